"""The process that grades, started by `grading.py`; it imports nothing of this package.

Requests and replies are JSON messages over the socket whose number is the first argument. For a
request `{"candidate", "answer"}`, which math-verify grades, it replies twice: whether the reference
answer could be read as mathematics, then (if it could) the candidate's value: 1 when they are
equal, 0 when not, or null when the candidate could not be read. The first reply lets the parent
tell a reference that hangs the worker from a completion that does. So it does for
`{"family", "settings", "number", "candidate"}`, where a family of reasoning-gym scores the
candidate as the answer to its example of that number. math-verify's own time limits are off: they
rest on signals, and the parent's clock is the one that counts.
"""

import contextlib
import functools
import importlib
import json
import logging
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection

MEMORY_LIMIT_BYTES = 4 << 30  # a tower of powers must not take the trainer's memory with it
COMPARED_DIGITS = 1000  # irrational constants are equal when this many digits are


def main(socket: int, max_seconds: float) -> None:
    """Serve requests until the parent closes its end."""
    connection = Connection(socket)
    _limit_memory()
    logging.disable(logging.WARNING)  # math-verify warns that its time limits are off
    try:
        import math_verify
    except ImportError as error:
        _send(connection, {"error": str(error)})
        return
    _send(connection, {"ready": True})
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # The parent kills a worker that is late. Should the parent be gone, this alarm does.
        signal.alarm(int(2 * max_seconds) + 1)
        if "family" in request:
            family = _family(request["family"], json.dumps(request["settings"]))
            entry = family[request["number"]]
            _send(connection, {"answer_read": True})
            _send(connection, {"value": _score(family, entry, request["candidate"])})
        else:
            answer = _parse(math_verify, request["answer"])
            _send(connection, {"answer_read": bool(answer)})
            if answer:
                _send(connection, {"value": _equal(math_verify, answer, request["candidate"])})
        signal.alarm(0)


@functools.cache
def _family(name: str, settings: str):
    package = importlib.import_module("reasoning_gym")  # optional, unlike what statements import
    return package.create_dataset(name, **json.loads(settings))


def _score(family, entry: dict, candidate: str) -> float | None:
    try:
        return float(family.score_answer(candidate, entry))
    except Exception:  # whatever it raises on a model's text, that text is no readable answer
        return None


def _parse(math_verify, text: str) -> list:
    # Decimals become fractions, so that nothing is compared as a rounded float.
    text = re.sub(
        r"(?<![\d.])(\d*)\.(\d+)",
        lambda m: rf"\frac{{{m[1]}{m[2]}}}{{{10 ** len(m[2])}}}",
        text,
    )
    # LaTeX only: math-verify's other reader passes the text to Python's eval.
    return math_verify.parse(
        f"${text}$",
        [math_verify.LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )


def _equal(math_verify, answer: list, candidate_text: str) -> bool | None:
    try:
        candidate = _parse(math_verify, candidate_text)
        if not candidate:
            return None
        return math_verify.verify(
            answer,
            candidate,
            float_rounding=COMPARED_DIGITS,
            numeric_precision=COMPARED_DIGITS,
            timeout_seconds=None,
        )
    except Exception:  # whatever sympy raises on a model's text, that text is no readable answer
        return None


def _limit_memory() -> None:
    # macOS refuses this limit; the time limit still holds there.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))


def _send(connection: Connection, message: dict) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
