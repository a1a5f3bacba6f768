"""Code actions: what they may do, and that whatever else they try ends in a typed outcome within its limit."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from plexrl.waiting.sandbox import Finished, Limits, Outcome, Program, Reason, Sandbox, Sleeping, Stopped
from plexrl.waiting.tools import Plain, ToolError, Tools

LIMITS = Limits(turn_s=0.3, run_s=0.6, memory_bytes=8 * 2**20, suspensions=200, sleep_s=1000, output_bytes=2000)
CANARY = "the canary's song"


def get(kind: str, name: str, verbose: bool = False) -> Plain:
    """The state of an object."""
    if name == "missing":
        raise ToolError(f"{kind} missing: not found")
    return {"kind": kind, "name": name, "ready": [1, 2.5, None, verbose]}


TOOLS = Tools("kubectl", {"get": get})


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS) as made:
        yield made


@pytest.fixture(scope="module")
def patient() -> Iterator[Sandbox]:
    """The same limits but for time: on a slow machine that would run out before what a case is about."""
    with Sandbox(replace(LIMITS, turn_s=30.0, run_s=60.0)) as made:
        yield made


def to_the_end(sandbox: Sandbox, code: str) -> tuple[Outcome, list[float]]:
    """Runs code, skipping its sleeps; returns how it ended and what it slept."""
    outcome, slept = sandbox.start(code, TOOLS), []
    while isinstance(outcome, Sleeping):
        slept.append(outcome.seconds)
        outcome = sandbox.resume(outcome.program, TOOLS)
    return outcome, slept


def test_a_sleep_is_handed_over_before_any_time_passes(sandbox: Sandbox) -> None:
    start = time.monotonic()
    outcome = sandbox.start("print('before')\ntime.sleep(600)\nprint('after')", TOOLS)
    assert isinstance(outcome, Sleeping)
    assert (outcome.seconds, outcome.output) == (600.0, "before\n")
    assert sandbox.resume(outcome.program, TOOLS) == Finished("after\n")
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "code",
    [
        "from time import sleep as rest\nrest(7)",
        "import time as clock\nclock.sleep(7)",
        "def wait(t):\n    time.sleep(t)\nfor t in [3, 4.0]:\n    wait(t)",
        "try:\n    time.sleep(7)\nfinally:\n    x = 1",
    ],
)
def test_every_way_to_sleep(sandbox: Sandbox, code: str) -> None:
    outcome, slept = to_the_end(sandbox, code)
    assert (outcome, sum(slept)) == (Finished(""), 7.0)


def test_tools_answer_with_plain_data(sandbox: Sandbox) -> None:
    code = "state = kubectl.get('deployment', name='web', verbose=True)\nprint(state['name'], state['ready'])"
    assert sandbox.start(code, TOOLS) == Finished("web [1, 2.5, None, True]\n")


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ("kubectl.get('deployment')", "missing a required argument: 'name'"),
        ("kubectl.get('deployment', 3)", "name: want text, not int"),
        ("kubectl.get('deployment', 'a', 1)", "verbose: want True or False, not int"),
        ("kubectl.get('deployment', 'a' * 5000)", "at most 1000 characters, not 5000"),
        ("kubectl.get('deployment', kubectl)", "name: want text, not ExternalModule"),
        ("kubectl.get('pod', 'missing')", "pod missing: not found"),
        ("kubectl.drain('node-1')", "no attribute 'drain'"),
    ],
)
def test_a_tool_called_wrongly_says_what_to_do(sandbox: Sandbox, call: str, complaint: str) -> None:
    outcome, _ = to_the_end(sandbox, call)
    assert isinstance(outcome, Stopped)
    assert outcome.reason is Reason.ERROR
    assert complaint in outcome.message
    caught, _ = to_the_end(sandbox, f"try:\n    {call}\nexcept Exception as error:\n    print('caught', error)")
    assert isinstance(caught, Finished)
    assert complaint in caught.output


def test_tools_with_unchecked_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="annotated"):
        Tools("kubectl", {"get": lambda anything: None})


BAD = {
    "negative sleep": ("time.sleep(-1)", Reason.BAD_SLEEP),
    "NaN sleep": ("time.sleep(float('nan'))", Reason.BAD_SLEEP),
    "infinite sleep": ("time.sleep(float('inf'))", Reason.BAD_SLEEP),
    "minus infinite sleep": ("time.sleep(float('-inf'))", Reason.BAD_SLEEP),
    "astronomic sleep": ("time.sleep(1e300)", Reason.BAD_SLEEP),
    "whole-number astronomic sleep": ("time.sleep(10**400)", Reason.BAD_SLEEP),
    "huge sleep": ("time.sleep(1e6)", Reason.SLEEP_LIMIT),
    "many long sleeps": ("while True:\n    time.sleep(90)", Reason.SLEEP_LIMIT),
    "sleep of text": ("time.sleep('10')", Reason.ERROR),
    "10,000 tiny sleeps": ("for _ in range(10_000):\n    time.sleep(0.001)", Reason.SUSPENSION_LIMIT),
    "endless zero sleeps": ("while True:\n    time.sleep(0)", Reason.SUSPENSION_LIMIT),
    "polling": ("while True:\n    kubectl.get('pod', 'a')", Reason.SUSPENSION_LIMIT),
    "reading the clock": ("while time.time() < 10:\n    pass", Reason.SUSPENSION_LIMIT),
    "unknown names": (
        "while True:\n    try:\n        nothing\n    except NameError:\n        pass",
        Reason.SUSPENSION_LIMIT,
    ),
    "never sleeps": ("while True:\n    pass", Reason.TIME_LIMIT),
    "never sleeps, and catches": (
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
        Reason.TIME_LIMIT,
    ),
    "computes between sleeps": (
        "while True:\n    n = 0\n    while n < 300_000:\n        n += 1\n    time.sleep(0)",
        Reason.TIME_LIMIT,
    ),
    "does not parse": ("def (:", Reason.SYNTAX),
    "prose": ("I will wait for ten seconds.", Reason.SYNTAX),
    "deeply nested text": ("(" * 5000 + ")" * 5000, Reason.SYNTAX),
    "too long a text": ("#" * 20_000, Reason.CODE_LIMIT),
    "list bomb": ("x = [0] * 10**10", Reason.MEMORY_LIMIT),
    "text bomb": ("x = 'a'\nwhile True:\n    x += x", Reason.MEMORY_LIMIT),
    "number bomb": ("x = 2 ** 10**10", Reason.MEMORY_LIMIT),
    "range bomb": ("x = sorted(range(10**9))", Reason.MEMORY_LIMIT),
    "format bomb": ("x = f'{1:>1000000000}'", Reason.MEMORY_LIMIT),
    "growing list": ("x = []\nwhile True:\n    x.append(list(range(1000)))", Reason.MEMORY_LIMIT),
    "deep recursion": ("def f(n):\n    return f(n + 1)\nf(0)", Reason.RECURSION_LIMIT),
    "mutual recursion": ("def f():\n    g()\ndef g():\n    f()\nf()", Reason.RECURSION_LIMIT),
    "class walk": ("().__class__.__bases__[0].__subclasses__()", Reason.ERROR),
    "function's globals": ("kubectl.get.__globals__", Reason.ERROR),
    "frame walk": ("(lambda: 0).__code__", Reason.ERROR),
    "import of socket": ("import socket", Reason.ERROR),
    "import of subprocess": ("import subprocess", Reason.ERROR),
    "import of ctypes": ("import ctypes", Reason.ERROR),
    "import by name": ("__import__('os').system('touch escaped')", Reason.ERROR),
    "import in exec": ("exec('import ctypes')", Reason.ERROR),
    "system": ("import os\nos.system('touch escaped')", Reason.ERROR),
    "environment": ("import os\nprint(os.environ)", Reason.ERROR),
    "reading a file": ("print(open('canary').read())", Reason.ERROR),
    "reading by pathlib": ("from pathlib import Path\nprint(Path('canary').read_text())", Reason.ERROR),
    "writing a file": ("open('escaped', 'w').write('x')", Reason.ERROR),
    "listing": ("import os\nprint(os.listdir('.'))", Reason.ERROR),
    "removing": ("from pathlib import Path\nPath('canary').unlink()", Reason.ERROR),
    "network": ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')", Reason.ERROR),
    "async sleep": ("import asyncio\nasync def f():\n    await asyncio.sleep(1)\nawait f()", Reason.ERROR),
    "input": ("input()", Reason.ERROR),
    "exit": ("raise SystemExit(0)", Reason.ERROR),
    "endless output": ("while True:\n    print('x' * 100)", Reason.OUTPUT_LIMIT),
    "one big output": ("print('x' * 100_000)", Reason.OUTPUT_LIMIT),
    "output between sleeps": ("while True:\n    print('x' * 100)\n    time.sleep(0)", Reason.OUTPUT_LIMIT),
    "a huge message": ("raise ValueError('x' * 10**6)", Reason.ERROR),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_code_ends_typed_within_its_limit_and_leaves_the_host_alone(
    sandbox: Sandbox, patient: Sandbox, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, reason = BAD[name]
    if reason in (Reason.SUSPENSION_LIMIT, Reason.MEMORY_LIMIT, Reason.RECURSION_LIMIT):
        sandbox = patient
    (tmp_path / "canary").write_text(CANARY)
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    outcome, slept = to_the_end(sandbox, code)
    assert isinstance(outcome, Stopped)
    assert outcome.reason is reason, outcome
    assert 0 < len(outcome.message) < 1100
    assert CANARY not in outcome.output + outcome.message
    assert len(outcome.output.encode()) <= LIMITS.output_bytes
    assert sum(slept) <= LIMITS.sleep_s
    assert len(slept) <= LIMITS.suspensions
    assert [path.name for path in tmp_path.iterdir()] == ["canary"]
    assert (tmp_path / "canary").read_text() == CANARY
    assert dict(os.environ) == before
    assert sandbox.start("print(1)", TOOLS) == Finished("1\n")


def test_no_connection_is_made(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        for code in (
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}))",
            f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}')",
            f"import http.client\nhttp.client.HTTPConnection('127.0.0.1', {port}).connect()",
        ):
            assert isinstance(to_the_end(sandbox, code)[0], Stopped)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_bombs_do_not_grow_the_host(sandbox: Sandbox) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    to_the_end(sandbox, "x = 1")
    before = resident_bytes()
    for _ in range(6):
        for name in ("text bomb", "growing list", "endless output", "a huge message"):
            to_the_end(sandbox, BAD[name][0].replace("while True:", "for _ in range(10**5):"))
    assert resident_bytes() - before < 32 * 2**20


def test_suspended_programs_hold_no_interpreter(sandbox: Sandbox) -> None:
    """A program that sleeps for ever is bytes: a hundred wait, on two processes, and any of them goes on."""
    waiting = []
    for number in range(100):
        outcome = sandbox.start(f"time.sleep({number})\nprint({number})", TOOLS)
        assert isinstance(outcome, Sleeping)
        waiting.append(outcome.program)
    assert sandbox.resume(waiting[70], TOOLS) == Finished("70\n")
    assert max(len(program.to_bytes()) for program in waiting) < 16_000


def test_a_program_is_a_value(sandbox: Sandbox) -> None:
    outcome = sandbox.start("n = [1]\ntime.sleep(5)\nn.append(2)\nprint(n)", TOOLS)
    assert isinstance(outcome, Sleeping)
    for _ in range(2):
        assert sandbox.resume(outcome.program, TOOLS) == Finished("[1, 2]\n")


def test_storing_does_not_reset_the_limits(sandbox: Sandbox) -> None:
    outcome = sandbox.start("while True:\n    time.sleep(400)", TOOLS)
    for _ in range(2):
        assert isinstance(outcome, Sleeping)
        outcome = sandbox.resume(Program.from_bytes(outcome.program.to_bytes()), TOOLS)
    assert isinstance(outcome, Stopped)
    assert outcome.reason is Reason.SLEEP_LIMIT


@pytest.mark.parametrize("stored", [b"", b"nonsense", b"plexrl-program-1\n\0\0\0\2{}"])
def test_what_is_no_program_is_refused(stored: bytes) -> None:
    with pytest.raises(ValueError, match="not a stored program"):
        Program.from_bytes(stored)


def test_a_damaged_program_is_refused(sandbox: Sandbox) -> None:
    outcome = sandbox.start("time.sleep(1)", TOOLS)
    assert isinstance(outcome, Sleeping)
    stored = outcome.program.to_bytes()
    with pytest.raises(ValueError, match="not a program"):
        sandbox.resume(Program.from_bytes(stored[:-40]), TOOLS)


def test_the_clock_is_the_one_it_is_given(sandbox: Sandbox) -> None:
    assert sandbox.start("print(time.time(), time.monotonic())", TOOLS, lambda: 1234.5) == Finished("1234.5 1234.5\n")


def test_a_tools_own_failure_is_the_hosts(sandbox: Sandbox) -> None:
    def broken() -> Plain:
        raise ConnectionError("the cluster is away")

    with pytest.raises(ConnectionError, match="away"):
        sandbox.start(
            "try:\n    kubectl.broken()\nexcept BaseException:\n    pass", Tools("kubectl", {"broken": broken})
        )


def test_an_interpreter_that_dies_is_replaced(sandbox: Sandbox) -> None:
    def kill() -> Plain:
        for child in psutil.Process().children():
            if child.name() == "monty":
                child.kill()
        return None

    outcome = sandbox.start("print('so far')\nkubectl.kill()", Tools("kubectl", {"kill": kill}))
    assert isinstance(outcome, Stopped)
    assert (outcome.reason, outcome.output) == (Reason.CRASHED, "so far\n")
    assert sandbox.start("print(1)", TOOLS) == Finished("1\n")


SUSPEND_AND_HANG = """
import sys, time
from plexrl.waiting.sandbox import Sandbox, Sleeping
from plexrl.waiting.tools import Tools
with Sandbox() as sandbox:
    outcome = sandbox.start("seen = ['pending']\\ntime.sleep(40)\\nprint(seen, kubectl.state())",
                            Tools("kubectl", {"state": lambda: "pending"}))
    assert isinstance(outcome, Sleeping)
    open(sys.argv[1], "wb").write(outcome.program.to_bytes())
    print(outcome.seconds, flush=True)
    time.sleep(60)
"""


def test_a_suspended_program_survives_the_death_of_its_process(tmp_path: Path, sandbox: Sandbox) -> None:
    stored = tmp_path / "program"
    process = subprocess.Popen([sys.executable, "-c", SUSPEND_AND_HANG, str(stored)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "40.0\n"
        interpreters = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
    assert interpreters
    assert psutil.wait_procs(interpreters, timeout=20)[1] == []
    program = Program.from_bytes(stored.read_bytes())
    tools = Tools("kubectl", {"state": lambda: "ready"})
    assert sandbox.resume(program, tools) == Finished("['pending'] ready\n")
