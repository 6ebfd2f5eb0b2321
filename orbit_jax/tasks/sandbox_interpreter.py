"""The process inside the sandbox that executes untrusted code; nothing that it says is trusted.

It takes requests as JSON frames and answers with frames that begin with a letter: `o` done, `e`
ended by an exception, `m` out of memory, `a` a question to the other side, `u` a test that cannot
be posed. Three kinds of request:
`program` executes code as a program of its own, which then ends as any program does; `call`
executes code in a namespace that is kept; `invoke` calls a function of that namespace and answers
with its plain value. Tests of a program run in an interpreter other than the program's: there,
names of the program stand for `Remote` values, whose calls are questions to it.
"""

import ast
import atexit
import builtins
import contextlib
import io
import json
import operator
import os
import resource
import sys
import types
from _sitebuiltins import Quitter
from collections.abc import Callable
from typing import Any, NoReturn

from sandbox_wire import decode, encode, read_frame, write_frame

OUT_OF_MEMORY = 86  # exit status of a program that ended with a MemoryError
PROGRAM_FILE = "program.py"

_ACTIONS: dict[str, Callable] = {
    "value": lambda value: value,
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "attribute": getattr,
    "assign": setattr,
    "item": operator.getitem,
    "length": len,
    "iterate": iter,
    "next": next,
    "truth": bool,
    "text": str,
    "display": repr,
}


class CannotCross(TypeError):
    """A test passes the program a value that cannot leave the test's interpreter."""


class Remote:
    """A function or object of the program under test, in the interpreter of its tests.

    It equals nothing but itself: whether a value is right is never left to the program.
    """

    def __init__(self, ask: Callable, number: int):
        self.__dict__.update(_ask=ask, _number=number)

    def __getattr__(self, name: str) -> Any:
        return self._ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("assign", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._ask("call", self, *args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self._ask("item", self, index)

    def __len__(self) -> int:
        return self._ask("length", self)

    def __iter__(self) -> Any:
        return self._ask("iterate", self)

    def __next__(self) -> Any:
        return self._ask("next", self)

    def __bool__(self) -> bool:
        return self._ask("truth", self)

    def __str__(self) -> str:
        return self._ask("text", self)

    def __repr__(self) -> str:
        return self._ask("display", self)


class Interpreter:
    """Executes requests until the process is ended from outside.

    Args:
      commands, reports: descriptors that requests come from and answers go to.
      limits: as `sandbox.Limits` has them.
    """

    def __init__(self, commands: int, reports: int, limits: dict):
        self.commands, self.reports, self.limits = commands, reports, limits
        self.objects: list[Any] = []
        self.calls = 0
        sys.argv = [PROGRAM_FILE]
        # The streams of this process are not those that its interpreter started with.
        sys.stdin = sys.__stdin__ = _stream(0, "r", "surrogateescape")
        sys.stdout = sys.__stdout__ = _stream(1, "w", "surrogateescape")
        sys.stderr = sys.__stderr__ = _stream(2, "w", "backslashreplace")
        builtins.exit, builtins.quit = Quitter("exit", "end"), Quitter("quit", "end")
        self.module = sys.modules["__main__"] = types.ModuleType("__main__")
        self.module.__builtins__ = builtins
        self.names = self.module.__dict__

    def serve(self) -> None:
        """Answer requests; a program ends the process."""
        while True:
            try:
                request = json.loads(read_frame(self.commands))
            except EOFError:
                return
            if request["kind"] == "program":
                os.close(self.commands)
                os.close(self.reports)
                self._run_program(request["code"])
            handle = self._call if request["kind"] == "call" else self._invoke
            answer = handle(request)
            sys.stdout.flush()
            write_frame(self.reports, answer)

    def _run_program(self, code: str) -> NoReturn:
        seconds = int(self.limits["cpu_seconds"]) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        with open(PROGRAM_FILE, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(code)  # tracebacks show its lines
        self.names["__file__"] = path = os.path.abspath(PROGRAM_FILE)
        status = 0
        try:
            exec(compile(code, path, "exec"), self.names)
        except SystemExit as end:
            status = _exit_status(end.code)
        except BaseException as error:
            _show_exception(error)
            status = OUT_OF_MEMORY if isinstance(error, MemoryError) else 1
        _leave(status)

    def _call(self, request: dict) -> bytes:
        """Execute code in the namespace that is kept, and show the value that it ends with."""
        self.calls += 1
        name = f"<call {self.calls}>"
        self.names["__name__"] = request["name"]
        sys.modules[request["name"]] = self.module
        try:
            self._find(request["stand_ins"])
            tree = ast.parse(request["code"], name)
            ends_with_value = tree.body and isinstance(tree.body[-1], ast.Expr)
            last = tree.body.pop() if ends_with_value else None
            exec(compile(tree, name, "exec"), self.names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), name, "eval"), self.names)
                if value is not None:
                    print(repr(value))
        except CannotCross as error:
            return b"u" + str(error).encode()
        except SystemExit as end:
            return b"o" if end.code in (None, 0) else b"e"
        except BaseException as error:
            _show_exception(error)
            return b"m" if isinstance(error, MemoryError) else b"e"
        return b"o"

    def _invoke(self, request: dict) -> bytes:
        """Do one of `_ACTIONS` to a value of this namespace, named or numbered."""
        try:
            of = request["of"]
            target = self.names[of] if isinstance(of, str) else self.objects[of]
            args = [decode(arg, self._resolve) for arg in request["args"]]
            kwargs = {name: decode(arg, self._resolve) for name, arg in request["kwargs"].items()}
            value = _ACTIONS[request["action"]](target, *args, **kwargs)
            return b"o" + json.dumps({"value": encode(value, self._keep)}).encode()
        except BaseException as error:
            raised = {"raised": type(error).__name__, "text": _text(error)}
            return b"o" + json.dumps(raised).encode()

    def _keep(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def _resolve(self, reference: int | list) -> Any:
        """An object of this namespace by its number, or a copy of one by its class and state."""
        if isinstance(reference, int):
            return self.objects[reference]
        name, state = reference
        copy = object.__new__(self.names[name])
        copy.__dict__.update(decode(state, self._resolve))
        return copy

    def _find(self, stand_ins: list[str]) -> None:
        """Give names of the program under test the values that they have there."""
        for name in stand_ins:
            with contextlib.suppress(Exception):  # using it raises a NameError, as it should
                self.names[name] = self._ask("value", name)

    def _ask(self, action: str, of: str | Remote, *args: Any, **kwargs: Any) -> Any:
        question = {
            "kind": "invoke",
            "action": action,
            "of": of if isinstance(of, str) else of._number,
            "args": [encode(arg, _refer) for arg in args],
            "kwargs": {name: encode(arg, _refer) for name, arg in kwargs.items()},
        }
        write_frame(self.reports, b"a" + json.dumps(question).encode())
        reply = json.loads(read_frame(self.commands))
        if "value" in reply:
            return decode(reply["value"], lambda number: Remote(self._ask, number))
        name, text = str(reply.get("raised")), str(reply.get("text"))
        kind = getattr(builtins, name, None)
        if kind in (StopIteration, StopAsyncIteration) and action != "next":
            kind = None  # it would end the test's own loops, as if all were well (PEP 479)
        if isinstance(kind, type) and issubclass(kind, Exception):  # not SystemExit and its like
            try:
                error = kind(text)
            except TypeError:
                error = RuntimeError(f"{name}: {text}")
            raise error
        raise RuntimeError(f"{name}: {text}")


def _exit_status(code: Any) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _leave(status: int) -> None:
    """End as Python does, but without taking the interpreter to pieces: half a program's cost."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        status = status or 120
    os._exit(status)


def _stream(descriptor: int, mode: str, errors: str) -> io.TextIOWrapper:
    binary = open(descriptor, mode + "b", closefd=False)  # noqa: SIM115 (as long as the process)
    return io.TextIOWrapper(binary, "utf-8", errors, line_buffering=descriptor == 2)


def _refer(value: Any) -> int | list:
    """How the program is told of a value that is not plain: its own by number, others as copies."""
    if isinstance(value, Remote):
        return value._number
    kind = type(value)
    if not all(one.__module__ == "__main__" for one in kind.__mro__[:-1]):  # all but object
        raise CannotCross(f"a test passes a {kind.__name__} to the program: pass plain values")
    return [kind.__qualname__, encode(vars(value), _refer)]


def _show_exception(error: BaseException) -> None:
    """As Python does, but without the lines of this file."""
    sys.stdout.flush()
    traceback = error.__traceback__ and error.__traceback__.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # a program's own exception may do anything
        return ""
