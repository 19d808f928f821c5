"""Damage and malice for every part of a checkpoint folder, by a seed: `PARTS[part](folder, random)` changes it in place."""

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 2, 2**31, 2**63, 10**40, -0.5, 1e308, float("nan"), float("inf"), "", "a\nb\x1b[2J",
    "../../etc/passwd", "x" * 100_000, [], [[]], [1, "a", None], {}, {"a": {"b": []}}, "float64", "int8", "\ud800",
]  # fmt: skip
TEMPLATES = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 'x' * 10**10 }}",
    "{{ 10 ** (10 ** 9) }}", "{{ messages[0].content * 10**7 }}", "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include '/etc/passwd' %}", "{{ raise_exception('no') }}", "{% for",
    "{{ cycler.__init__.__globals__ }}", "{{ range(10**9) | list }}", "{{ '%s' | format('a') }}{{ messages }}", "",
]  # fmt: skip


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def bytes_changed(data: bytes, rng: random.Random, start: int = 0) -> bytes:
    """Some bytes from `start` on flipped, overwritten, cut off, inserted or repeated."""
    out = bytearray(data)
    if len(out) <= start:
        return bytes(out) + b"x"
    at = rng.randrange(start, len(out))
    match rng.randrange(6):
        case 0:
            out[at] ^= 1 << rng.randrange(8)
        case 1:
            out[at : at + 64] = rng.randbytes(len(out[at : at + 64]))
        case 2:
            del out[at:]
        case 3:
            out[at:at] = rng.randbytes(rng.randrange(1, 64))
        case 4:
            out[at:at] = out[start:at]
        case 5:
            out[at:] = bytes(len(out) - at)
    return bytes(out)


def leaf_changed(value: Any, rng: random.Random) -> Any:
    """A JSON value with a leaf, a key or an item replaced, removed or added, somewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return value | {rng.choice(["x", "a\n", "auto_map", "quant_method"]): rng.choice(HOSTILE)}
            case 2:
                return {(k + "\n" if k == key else k): v for k, v in value.items()}
            case _:
                return value | {key: leaf_changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], leaf_changed(value[at], rng), *value[at + 1 :]]
    if type(value) in (int, float) and rng.random() < 0.5:
        return rng.choice([value + 1, value - 1, -value, value * 2, value / 2, float(value), str(value)])
    return rng.choice(HOSTILE)


def edit_json(path: Path, rng: random.Random) -> None:
    if rng.random() < 0.2:
        path.write_bytes(bytes_changed(path.read_bytes(), rng))
        return
    path.write_text(json.dumps(leaf_changed(json.loads(path.read_bytes()), rng)), encoding="utf-8")


def checksums_renewed(folder: Path) -> None:
    """As an author would who changes a file on purpose."""
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in weight_files(folder)}
    (folder / "checksums.json").write_text(json.dumps({"algorithm": "sha256", "files": digests}))


def header(folder: Path, rng: random.Random) -> None:
    """The header of a weight file: its length, its JSON, or a value in it."""
    file = rng.choice(weight_files(folder))
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    match rng.randrange(3):
        case 0:
            claimed = rng.choice([0, 1, length - 1, length + 8, len(data), 2**40, 2**63])
            data = struct.pack("<Q", claimed) + data[8:]
        case 1:
            text = json.dumps(leaf_changed(json.loads(data[8 : 8 + length]), rng)).encode()
            data = struct.pack("<Q", len(text)) + text + data[8 + length :]
        case 2:
            data = data[:8] + bytes_changed(data[8 : 8 + length], rng) + data[8 + length :]
    file.write_bytes(data)
    checksums_renewed(folder)


def data(folder: Path, rng: random.Random) -> None:
    """Tensors as a bad disk leaves them: only checksums.json knows."""
    file = rng.choice(weight_files(folder))
    content = file.read_bytes()
    file.write_bytes(bytes_changed(content, rng, 8 + int.from_bytes(content[:8], "little")))


def values(folder: Path, rng: random.Random) -> None:
    """Tensors as an author writes them, with checksums that agree."""
    data(folder, rng)
    checksums_renewed(folder)


def config(folder: Path, rng: random.Random) -> None:
    edit_json(folder / rng.choice(["config.json", "config.json", "generation_config.json"]), rng)


def entry(folder: Path, rng: random.Random) -> None:
    """quantization_config: the versions, the table of matrices."""
    path = folder / "config.json"
    content = json.loads(path.read_bytes())
    content["quantization_config"] = leaf_changed(content["quantization_config"], rng)
    path.write_text(json.dumps(content))


def index(folder: Path, rng: random.Random) -> None:
    edit_json(folder / rng.choice(["model.safetensors.index.json", "checksums.json"]), rng)


def tokenizer(folder: Path, rng: random.Random) -> None:
    edit_json(folder / rng.choice(["tokenizer.json", "tokenizer_config.json"]), rng)


def recipe(folder: Path, rng: random.Random) -> None:
    import yaml

    path = folder / "recipe.yaml"
    content = path.read_text()
    match rng.randrange(5):
        case 0:
            path.write_bytes(bytes_changed(content.encode(), rng))
        case 1:
            path.write_text("a: &a [x,x,x]\n" + "".join(f"b{i}: &a [*a,*a,*a,*a,*a,*a]\n" for i in range(30)))
        case 2:
            path.write_text("a: " + rng.choice("[{") * rng.choice([20, 60_000]))
        case _:
            path.write_text(yaml.dump(leaf_changed(yaml.safe_load(content), rng)))


def chat_template(folder: Path, rng: random.Random) -> None:
    (folder / "chat_template.jinja").write_text(rng.choice(TEMPLATES))


def files(folder: Path, rng: random.Random) -> None:
    """A pipe, a device, a sparse giant, a folder or nothing under the name of a file."""
    path = rng.choice([p for p in sorted(folder.iterdir()) if p.is_file() and p.suffix != ".yaml"])
    path.unlink()
    match rng.randrange(6):
        case 0:
            os.mkfifo(path)
        case 1:
            path.symlink_to(rng.choice(["/dev/zero", "/dev/full", path.name, "/nowhere"]))
        case 2:
            path.touch()
            os.truncate(path, rng.choice([0, 8, 1 << 20, 1 << 33]))
        case 3:
            path.mkdir()
        case 4:
            path.write_bytes(b'{"a":[' + rng.choice([b"[],", b'{"":{}},', b"1,"]) * (3 << 20) + b"0]}")


PARTS: dict[str, Callable[[Path, random.Random], None]] = {
    "header": header,
    "data": data,
    "values": values,
    "config": config,
    "entry": entry,
    "index": index,
    "tokenizer": tokenizer,
    "recipe": recipe,
    "chat template": chat_template,
    "files": files,
}
