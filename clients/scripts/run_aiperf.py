"""aiperf: two streams at a time over synthetic prompts, on each route that generates."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

REQUESTS = 6


def main(url: str, model: str, tokenizer: str) -> None:
    for kind in ("chat", "completions", "responses", "messages"):
        with tempfile.TemporaryDirectory() as folder:
            options = {
                "--model": model,
                "--url": url,
                "--endpoint-type": kind,
                "--tokenizer": tokenizer,
                "--isl": "64",
                "--osl": "16",
                "--concurrency": "2",
                "--request-count": str(REQUESTS),
                "--workers-max": "1",
                "--record-processor-service-count": "1",
                "--ui": "none",
                "--output-artifact-dir": folder,
            }
            command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--streaming"]
            subprocess.run(
                [*command, "--no-gpu-telemetry", *(part for pair in options.items() for part in pair)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            report = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
        assert report["request_count"]["avg"] == REQUESTS
        assert not report.get("error_summary"), report["error_summary"]
        assert report["time_to_first_token"]["avg"] > 0
        print(f"streamed: {kind}")


main(*sys.argv[1:])
