"""`python -m services.worker.convert SRC DST`: a GGUF file becomes a model folder in float32.

The folder holds what every service needs: config.json, generation_config.json, model.safetensors, tokenizer.json and
tokenizer_config.json with the chat template. It appears at DST complete or not at all.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from services.worker.model.config import UnsupportedModel
from services.worker.model.gguf import GgufModel
from services.worker.model.gguf_tokenizer import build_tokenizer, tokenizer_config


def convert(source: Path, destination: Path) -> None:
    """Convert the GGUF file `source` into the folder `destination`, which must not exist yet.

    Raises UnsupportedModel for a file this engine cannot serve, OSError where reading or writing fails.
    """
    if destination.exists():
        raise FileExistsError(f"{destination} exists already")
    model = GgufModel(source)
    destination.parent.mkdir(parents=True, exist_ok=True)
    # Beside the destination, so that the rename at the end stays within one file system and is atomic.
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        config = model.hf_config()
        _write_json(work / "config.json", config)
        _write_json(work / "generation_config.json", _generation_config(config, model.end_token_ids()))
        build_tokenizer(model).save(str(work / "tokenizer.json"))
        _write_json(work / "tokenizer_config.json", tokenizer_config(model))
        weights = {name: model.read(name) for name in _with_progress(model.names())}
        save_file(weights, work / "model.safetensors", metadata={"format": "pt"})
        (work / "model.safetensors").chmod(
            0o644
        )  # written for its owner only, like the folder below: hides a shared cache
        work.chmod(0o755)
        work.rename(destination)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _generation_config(config: dict[str, Any], end_token_ids: Sequence[int]) -> dict[str, Any]:
    ids = {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config}
    return ids | {"eos_token_id": end_token_ids[0] if len(end_token_ids) == 1 else list(end_token_ids)}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_progress(names: Sequence[str]) -> Iterator[str]:
    """Pass the names through; tell on stderr how far: one line that updates on a terminal, one per tenth elsewhere."""
    terminal = sys.stderr.isatty()
    for done, name in enumerate(names, start=1):
        yield name
        percent, before = 100 * done // len(names), 100 * (done - 1) // len(names)
        if terminal:
            print(
                f"\rconverting weights {percent:3d}%",
                end="\n" if done == len(names) else "",
                file=sys.stderr,
                flush=True,
            )
        elif percent // 10 > before // 10:
            print(f"converting weights {percent:3d}%", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="services.worker.convert", description="Convert a GGUF file into a model folder."
    )
    parser.add_argument("source", type=Path, help="the GGUF file")
    parser.add_argument("destination", type=Path, help="the folder to make; must not exist")
    arguments = parser.parse_args(argv)
    try:
        convert(arguments.source, arguments.destination)
    except (UnsupportedModel, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
