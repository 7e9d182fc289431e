"""Convert the built-in model's GGUF file to a folder of safetensors.

It runs in a separate process (``python -m app.launch.convert_gguf FILE FOLDER``), so that the memory and the
output of the conversion end with it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

CONTEXT_LENGTH = 8192  # tokens


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in bfloat16, its tokenizer, chat template and generation settings to ``folder``."""
    import torch
    import transformers

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # older releases unpack always, newer ones when told to
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, **options
    )
    model.save_pretrained(folder)
    read_tokenizer(gguf).save_pretrained(folder)


def read_tokenizer(gguf: Path) -> Any:
    """The file's tokenizer, with the pre-tokenizer that its vocabulary was trained for.

    The file names it "smollm", which transformers does not know and replaces by GPT-2's: there, digits
    stay together. SmolLM2 takes each digit alone.
    """
    import transformers
    from tokenizers import pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    return tokenizer


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m app.launch.convert_gguf", description=__doc__)
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="where to write the safetensors folder")
    options = parser.parse_args(arguments)
    if not options.file.is_file():
        parser.error(f"{options.file} does not exist")
    convert(options.file, options.folder)


if __name__ == "__main__":
    main()
