"""guidellm: two streams at a time over synthetic prompts, as chats and as completions."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

REQUESTS = 6


def main(url: str, model: str, tokenizer: str) -> None:
    for route in ("/v1/chat/completions", "/v1/completions"):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            options = {
                "--backend": f"kind=openai_http,target={url},model={model},request_format={route}",
                "--profile": "kind=concurrent,streams=2",
                "--constraint": f"kind=max_requests,count={REQUESTS}",
                "--tokenizer": f"kind=huggingface_auto,model={tokenizer}",
                "--data": "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
                "--output": f"kind=json,path={report}",
            }
            command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
            subprocess.run([*command, *(part for pair in options.items() for part in pair)], check=True)
            (benchmark,) = json.loads(report.read_text())["benchmarks"]
        done = benchmark["requests"]
        assert not done["errored"], done["errored"][0]
        assert len(done["successful"]) == REQUESTS
        assert all(request["output_tokens"] == 16 for request in done["successful"])
        assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["median"] > 0
        print(f"concurrent, streamed: {route}")


main(*sys.argv[1:])
