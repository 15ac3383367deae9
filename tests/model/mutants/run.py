"""Opens mutants in forked children under limits of address space and CPU time.

`python -m tests.model.mutants.run --seed 7 --count 500` prints outcomes and faults as JSON; `--only I` opens
one mutant, `--keep FOLDER` keeps its files. Many mutants share a child; when one ends it, that one is
reported and a new child goes on behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dynamictp.errors import BadRequest, ModelRefused
from dynamictp.model.load import open_model
from tests.model.mutants.mutate import mutant
from tests.model.mutants.seeds import seeds

HEADROOM_BYTES = 256 << 20
"""What a child may map beyond what it has when it is forked. The files are below 100 KB."""
CPU_S = 3.0
"""CPU time of one mutant; a sound file takes milliseconds."""
MAX_MESSAGE = 1000
TEXT = "Hello wörld, 12 <|im_end|> ▁x\n"
MESSAGES = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "hello"}]


def use(path: Path) -> str:
    """Do with a model what a server does before it allocates memory for it. Returns `loaded` or `refused`."""
    try:
        source = open_model(str(path))
        source.sampling_defaults()
        tokenizer = source.tokenizer()
        template = source.chat_template()
    except ModelRefused as error:
        if len(str(error)) > MAX_MESSAGE:
            raise AssertionError(f"a message of {len(str(error))} characters: {str(error)[:200]}") from error
        return "refused"
    for name in source.names:
        last = source.shape(name)[0]
        source.rows(name, max(0, last - 2), last)
        source.int8_rows(name, 0, 1)
    refused = 0
    for text in (TEXT, "a" * 2000):
        try:
            tokenizer.decode(tokenizer.encode(text), False)
        except BadRequest:
            refused += 1
    tokenizer.decode(range(source.facts.vocab + 2) if source.facts.vocab < 10_000 else [0], True)
    try:
        template.render(MESSAGES)
    except BadRequest as error:
        if len(str(error)) > MAX_MESSAGE:
            raise AssertionError(f"a message of {len(str(error))} characters: {str(error)[:200]}") from error
        refused += 1
    return "loaded, refuses texts" if refused else "loaded"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--only", type=int)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    assert "torch" not in sys.modules
    wanted = range(options.count) if options.only is None else range(options.only, options.only + 1)
    outcomes: Counter[str] = Counter()
    faults = []
    seeds()
    sound = []
    for index, outcome, detail in open_all(options.seed, wanted, options.keep):
        outcomes[outcome] += 1
        if index < len(seeds()):
            sound.append(outcome)
        if outcome not in ("loaded", "refused", "loaded, refuses texts"):
            faults.append(
                {"index": index, "did": mutant(options.seed, index)[1], "what": outcome, "detail": detail}
            )
    result = {"seed": options.seed, "sound": sound, "outcomes": outcomes, "faults": faults}
    print(json.dumps(result))
    return 1 if faults else 0


def open_all(seed: int, wanted: range, keep: Path | None) -> Iterator[tuple[int, str, str]]:
    """(index, outcome, detail) of every mutant."""
    # A child that ends in the middle leaves its files here.
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        tempfile.tempdir = scratch
        yield from _open_all(seed, wanted, keep)


def _open_all(seed: int, wanted: range, keep: Path | None) -> Iterator[tuple[int, str, str]]:
    start = wanted.start
    while start < wanted.stop:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with os.fdopen(writer, "wb", buffering=0) as out:
                _child(seed, range(start, wanted.stop), out, keep)
            os._exit(0)
        os.close(writer)
        begun = start
        with os.fdopen(reader, "rb") as lines:
            for line in lines:
                message = json.loads(line)
                begun = message["index"]
                if "outcome" in message:
                    yield begun, message["outcome"], message["detail"]
                    start = begun + 1
        _, status = os.waitpid(child, 0)
        if start < wanted.stop:
            code = os.waitstatus_to_exitcode(status)
            name = signal.Signals(-code).name if code < 0 else f"exit {code}"
            yield begun, "too much CPU time" if name == "SIGPROF" else f"crash: {name}", ""
            start = begun + 1


def _child(seed: int, indices: range, out: BinaryIO, keep: Path | None) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Libraries that give up write to stderr; the parent reports what matters.
    quiet = os.open(os.devnull, os.O_WRONLY)
    if keep is None:
        os.dup2(quiet, 2)
    for index in indices:
        out.write(json.dumps({"index": index}).encode() + b"\n")
        outcome, detail = _one(seed, index, keep)
        out.write(json.dumps({"index": index, "outcome": outcome, "detail": detail}).encode() + b"\n")


def _one(seed: int, index: int, keep: Path | None) -> tuple[str, str]:
    folder = keep or Path(tempfile.mkdtemp(prefix="mutant-"))
    folder.mkdir(exist_ok=True)
    try:
        path = mutant(seed, index)[0].write(folder)
        # Its default action ends the process, wherever it is: a handler would wait for the interpreter.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        return use(path), ""
    except BaseException as error:  # noqa: BLE001  (a panic of a library is not an Exception)
        return f"{type(error).__name__}: {str(error)[:200]}", _tail(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if keep is None:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


def _tail(error: BaseException) -> Any:
    return "".join(traceback.format_exception(error)[-4:])[-1500:]


if __name__ == "__main__":
    sys.exit(main())
