"""Writing the embedded corpus to a folder, once."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from dataset import tools
from dataset.builtin.corpus import corpus_files
from dataset.builtin.world import build_world

STAMP = "stamp.json"


def generator_version() -> str:
    """The sha256 of the generator's own source files: a changed generator means a new corpus."""
    folder = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in [*sorted(folder.rglob("*.py")), Path(tools.__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def ensure_builtin_corpus(folder: str | Path, seed: int = 0) -> dict[str, Path]:
    """Write the embedded corpus to `folder` unless it is there already, and give the path of each file.

    Names are "pretrain.train", "pretrain.val", "midtrain.train", ... "eval.test"; the file is `<name>.jsonl`. The
    folder is written under a temporary name and renamed, so it is never seen half-written, and any number of
    processes may ask for it at once. A corpus of another generator version or seed is replaced; the files of a folder
    that holds no corpus are left alone.

    Raises:
        ValueError: `folder` is a file, or holds something else than an embedded corpus.
    """
    folder = Path(folder)
    stamp = {"generator": generator_version(), "seed": seed}
    paths = _files_of(folder, stamp)
    if paths is not None:
        return paths
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / STAMP).is_file()):
        raise ValueError(f"{folder} holds something else than the embedded corpus: name an empty or a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(fresh, stamp, seed)
        _put_in_place(fresh, folder, stamp)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    paths = _files_of(folder, stamp)
    assert paths is not None, f"the corpus at {folder} was replaced by another generator's at the same moment"
    return paths


def _files_of(folder: Path, stamp: dict) -> dict[str, Path] | None:
    """The paths of a complete corpus with that stamp, or None."""
    try:
        found = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or any(found.get(key) != value for key, value in stamp.items()):
        return None
    paths = {name: folder / f"{name}.jsonl" for name in found["sizes"]}
    whole = all(path.is_file() and path.stat().st_size == found["sizes"][name] for name, path in paths.items())
    return paths if whole else None


def _write(folder: Path, stamp: dict, seed: int) -> None:
    """All files, and the stamp last."""
    byte_sizes = {}
    for name, rows in corpus_files(build_world(), seed):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        data = text.encode("utf-8")
        (folder / f"{name}.jsonl").write_bytes(data)
        byte_sizes[name] = len(data)
    (folder / STAMP).write_text(json.dumps(stamp | {"sizes": byte_sizes}, indent=1) + "\n", encoding="utf-8")
    folder.chmod(0o755)


def _put_in_place(fresh: Path, folder: Path, stamp: dict) -> None:
    """Rename the fresh folder to its place; an outdated one steps aside first. The last of several writers wins."""
    while True:
        try:
            os.rename(fresh, folder)
            return
        except OSError:
            if _files_of(folder, stamp) is not None:
                return
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
        try:
            os.rename(folder, aside / "corpus")
        except FileNotFoundError:
            pass
        finally:
            shutil.rmtree(aside, ignore_errors=True)
