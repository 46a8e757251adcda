"""Programs get the right verdict, and nothing outside can be seen, changed or held up by one while it runs.

    pytest tests/test_code.py            # what runs in the sandbox needs bubblewrap: apt install bubblewrap

`data/code.jsonl` is a table of programs, the right verdict and the reason; the hostile ones must never run unsandboxed.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import tracemalloc
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, soon

from packing import Problem
from recipes.data import load_problems
from reward import Scorer, ScorerError, code_verdict, extract_program, same_output, same_value
from sandbox import PROGRAM_PROCESSES, SandboxError, run_program, sandbox_fault

needs = pytest.mark.skipif(bool(sandbox_fault()), reason=f"{sandbox_fault()}; apt install bubblewrap")
ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
SUMS = {"function": "", "inputs": ["2 3\n", "10 -4\n"], "outputs": ["5\n", "6\n"]}
PROBLEM, ROW = Problem("p", "p", tests=SUMS), {"id": "sum", "response": ADD, "tests": SUMS, "expected": True}
CONFIG = SimpleNamespace(scorers=2, score_timeout=0.2, test_timeout=3, code_timeout=60, unsafe_code=False, reward="")


def ask(expression: str, given=None, **more):
    """The value of an expression in a program; `can(call, *arguments)` tells whether a call is allowed there."""
    program = f"""
import ctypes, json, os, resource, socket
libc, given, limits = ctypes.CDLL(None), json.loads(input()), (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
def can(call, *arguments):
    try: return call(*arguments) or True
    except (OSError, ValueError): return False
print(json.dumps({expression}))"""
    ran = run_program(program, json.dumps(given), timeout_s=30, **more)
    assert ran.outcome == "", ran
    return json.loads(ran.output)


def living(mark: Path) -> list[str]:
    """Processes with this mark in their command line, which holds the text of a program."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found += [path.parent.name] * (str(mark).encode() in path.read_bytes())
    return found


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def check(*words, **more) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, ROOT / "reward.py", "check", *words], capture_output=True, text=True, **more)
    return done.returncode, done.stdout, done.stderr


@needs
def test_every_program_of_the_table_is_judged_right_and_leaves_nothing(tmp_path):
    [(tmp_path / name).mkdir() for name in ("here", "temporary")]
    text = (ROOT / "tests/data/code.jsonl").read_text().replace("```python\\n", f"```python\\n# {tmp_path}\\n")
    (tmp_path / "code.jsonl").write_text(text)
    done = check(tmp_path / "code.jsonl", cwd=tmp_path / "here", env=os.environ | {"TMPDIR": f"{tmp_path}/temporary"})
    assert done[:2] == (0, "44 right, 0 wrong\n"), done
    assert [os.listdir(tmp_path / name) for name in ("here", "temporary")] == [[], []]
    assert not any(os.path.exists(f"/tmp/cases_{name}_marker") for name in ("unpickled", "outside"))  # two try to
    soon(lambda: not living(tmp_path), 2)


@needs
def test_only_the_system_and_python_are_in_sight_and_cannot_be_changed(tmp_path):
    (tmp_path / "secret").write_text("x")
    pythons = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent)}
    shown = pythons | {"/usr", "/bin", "/lib", "/lib64", "/dev", "/proc", "/tmp"}
    hidden = ["/", str(Path.home()), str(ROOT), str(tmp_path)]
    folders = [*hidden, *shown - {"/tmp"}, "/usr/lib", "/etc", "/var", "/run", "/sys", "/home", "/root"]
    files = ["/etc/passwd", "/etc/hostname", str(ROOT / "reward.py"), str(tmp_path / "secret"), "/dev/kmsg", "/dev/sda"]
    listed, changed, read = ask("""[[os.listdir(f) if os.path.isdir(f) else [] for f in given[0]],
        [f for f in given[0] if can(os.mkdir, f + '/boba_left') and not os.rmdir(f + '/boba_left')],
        [f for f in given[1] if can(os.open, f, os.O_RDONLY)]]""", [folders, files])  # fmt: skip
    assert changed == read == [] and "python3" in "".join(sum(listed, []))
    for folder, names in zip(hidden, listed, strict=False):  # at most what lies on the way to what is shown
        ways = [Path(path).relative_to(folder).parts for path in shown if Path(path).is_relative_to(folder)]
        assert {*names} <= {parts[0] for parts in ways if parts}, folder
    look = "[f for f in given if 'left' in os.listdir(f)] + [os.makedirs(f + '/left', exist_ok=True) for f in given]"
    assert [ask(look, [".", "/tmp", "/dev/shm"]) for _ in range(2)] == [[None] * 3] * 2  # they are new for each run


@needs
@pytest.mark.parametrize("look, found", [
    ("[can(socket.create_connection, ('127.0.0.1', given['port']), 5) is not False, "
     "can(socket.socket(socket.AF_UNIX).connect, given['name'])]", [False, False]),
    ("[p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()]", ["1"]),
    ("[name for name in given['spaces'] if given['spaces'][name] == os.readlink(f'/proc/self/ns/{name}')]", []),
    ("[n for n in range(3, 999) if can(os.fstat, n)]", []), ("[name for _, name in socket.if_nameindex()]", ["lo"]),
    ("[[p for p in os.listdir('/proc') if can(open, f'/proc/{p}/environ') and 'boba_secret' in "
     "open(f'/proc/{p}/environ').read()], os.environ.get('SECRET')]", [[], None]),
    ("[[len({*resource.getrlimit(n)}), can(resource.setrlimit, n, (-1, -1))] for n in limits]", [[1, False]] * 2),
    ("[line.split()[1].strip('0') for line in open('/proc/self/status') if line[:4] in ('CapP', 'CapE', 'NoNe')]",
     ["", "", "1"]),
    # Settings of the kernel (opened, not written); memory that counts for no process; vsock, the way out of a machine.
    ("[f for folder, _, names in os.walk('/proc/sys') for f in names if can(os.open, f'{folder}/{f}', 1)][:5]", []),
    ("[libc.unshare(1 << 28), libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 1 << 28 | 17, 0, 0, 0, 0), "
     "libc.memfd_create(b'', 0), libc.shmget(0, ctypes.c_size_t(9), 896), can(socket.socket, 40, 1)]", [-1] * 4 + [0]),
])  # fmt: skip
def test_a_program_has_nothing_of_the_grader_and_no_way_round_its_bounds(tmp_path, monkeypatch, look, found):
    monkeypatch.setenv("SECRET", "boba_secret")
    spaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "ipc", "uts", "mnt")}
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        os.set_inheritable(server.fileno(), True)
        local.bind(name := f"\0boba-{os.getpid()}")  # a name without a file belongs to the network
        local.listen()
        given = {"port": server.getsockname()[1], "name": name, "spaces": spaces}
        assert ask(look, given) == found
        assert "AF_UNIX" not in look or ask(look, given, unsafe=True) == [True, True]  # they can be reached


FOREVER = "import time\ntime.sleep(600)\n"
ESCAPE = "import os, time\nif os.fork() == 0: os.setsid(); os.fork() or time.sleep(600); os._exit(0)\nos.wait()\n"


@needs
def test_nothing_outlives_a_program_or_a_killed_grader_and_no_verdict_waits_for_it(tmp_path):
    begin = time.monotonic()
    assert run_program(f"# {tmp_path}\n{ESCAPE}print(5)", timeout_s=30).output == b"5\n"
    assert time.monotonic() - begin < 15  # the grandchild holds the output open for ten minutes
    soon(lambda: not living(tmp_path), 2)
    grader = [sys.executable, "-c", "import os, sandbox; sandbox.run_program(os.environ['PROGRAM'], timeout_s=600)"]
    with subprocess.Popen(grader, cwd=ROOT, env=os.environ | {"PROGRAM": f"# {tmp_path}\n{ESCAPE}{FOREVER}"}) as judge:
        soon(lambda: len(living(tmp_path)) >= 4, 20)  # bubblewrap outside and inside, the program, its grandchild
        judge.kill()
    soon(lambda: not living(tmp_path), 5)


SPAWN = "import os, time\nfor _ in range({}):\n    if os.fork() == 0: {}; time.sleep(60)\ntime.sleep(60)"
FULL, LONG = "No space left on device", "a program may have 120000 bytes, and no NUL"
DEAF = "import signal as s\nfor n in {*range(1, 65)} - {9, 19, 32, 33}: s.signal(n, s.SIG_IGN)\n"
DEAF += "while 1:\n try:\n  while 1: 0\n except: 0"


@needs
@pytest.mark.parametrize("program, seconds, outcome, said", [
    ("bytearray(2 << 30)", 30, "error", "MemoryError"), (SPAWN.format(8, "x = b'x' * (200 << 20)"), 60, "limit", ""),
    (SPAWN.format(PROGRAM_PROCESSES, "0"), 10, "error", "Resource temporarily unavailable"), (DEAF, 1, "timeout", ""),
    ("print('x' * (2 << 20))", 30, "limit", ""), ("while True: print('x' * (1 << 20))", 30, "limit", "File too large"),
    ("open('a', 'wb').write(b'x' * (33 << 20))", 30, "error", "File too large"), (FOREVER, 1, "timeout", ""),
    ("for n in 'abc': open(n, 'wb').write(b'x' * (20 << 20))", 30, "error", FULL), ("1\0", 30, "syntax", LONG),
    ("for n in 'abc': open('/dev/shm/' + n, 'wb').write(b'x' * (20 << 20))", 30, "error", FULL),
    ("#" * 120_001, 30, "syntax", LONG), ("#" + "é" * 60_000, 30, "syntax", LONG), ("#" * 119_900, 30, "", ""),
], ids=lambda value: str(value)[-40:])  # fmt: skip
def test_bounds(program, seconds, outcome, said, tmp_path):
    begin = time.monotonic()
    tracemalloc.start()
    ran = run_program(f"{program}\n# {tmp_path}", timeout_s=seconds)
    assert (ran.outcome, said in ran.errors) == (outcome, True), ran
    assert len(ran.output) <= 1 << 20 and len(ran.errors) <= 2000 and time.monotonic() - begin < max(seconds, 10)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20  # the peak, for up to 32 MiB that are printed
    tracemalloc.stop()
    soon(lambda: not living(tmp_path), 5)


F, CLASS = "def f(x): return x", "class Solution:\n  def f(self, x): return"
DATA = "from __future__ import annotations\nimport dataclasses, pickle as p\n@dataclasses.dataclass\nclass A: x: No\n"
DEEP = "import sys\nsys.setrecursionlimit(10**6)\ndef d(n): return n and 1 + d(n - 1)\nprint(d(50_000))"
THREADS = "import threading as t, time\nfor _ in range({}): t.Thread(target=time.sleep, args=[60], daemon={}).start()\n"


@needs
@pytest.mark.parametrize("program, outcome, output", [  # with an f it is called with 3, else two lines are its input
    (F, "", "3"), (f"{CLASS} [x, x + 1]", "", "[3, 4]"), (f"{F}\n{CLASS} 4", "", "4"), ("f = 1 # f()", "error", ""),
    (f"{F}, (1, ())", "", "[3, [1, []]]"), ("def f(x): print(1); return x", "", "3"), (f"{F}, input()", "error", ""),
    ("def f(x): 1/0", "error", ""), (f"{F}, {{x}}", "error", ""), (f"{F}\nprint(9); import sys; sys.exit(0)", "", ""),
    ("import sys\ndef f(x): sys.exit(5)", "", ""), ("import os\ndef f(x): os._exit(0)", "", ""),
    ("import os\ndef f(x): os._exit(1)", "error", ""), ("def f(x): import os; os.kill(os.getpid(), 9)", "error", ""),
    ("def f(x: List[int]): return x, pow(5, 3, 7), gcd(4, 6), math.pi // 1, heappop([x])", "", "[3, 6, 2, 3.0, 3]"),
    (f"{F} + 10**5000", "", f"1{'0' * 4999}3"), (THREADS.format(25, True) + F, "", "3"), ("print(List)", "error", ""),
    (THREADS.format(1, False) + F, "timeout", "3"), (THREADS.format(1, True) + "print(1)", "", "1\n"),
    ("print(repr(input()), repr(input()))", "", "'é' '7\\r'\n"), ("print(int(input()[1:] + input()))", "", "7\n"),
    ("print(open('/dev/stdin', newline='').read() + 'ü')", "", "é\n7\r\nü\n"), ("print(1); 1/0", "error", "1\n"),
    ("print(gcd(1, 2))", "error", ""), ("if __name__ == '__main__': print(1)", "", "1\n"), (DEEP, "", "50000\n"),
    (DATA + "print(p.loads(p.dumps(A(2))))", "", "A(x=2)\n"), ("eval('1+')", "error", ""),
    ("import os\nfor _ in range(20): os.fork() or os._exit(0)\nprint(1)", "", "1\n"), ("def g(:", "syntax", ""),
    ("print(1); raise SystemExit('no')", "", "1\n"), ("\tprint(1)\nprint(2)", "syntax", ""),
    *[(f"import numpy as np\n{F}, np.arange(2), np.float32(0.5)", "", "[3, [0, 1], 0.5]")] * bool(find_spec("numpy")),
], ids=lambda value: str(value)[-40:])  # fmt: skip
def test_a_program_is_run_as_its_author_expects(program, outcome, output):
    how = {"stdin": "[3]", "function": "f"} if "f(" in program else {"stdin": "é\n7\r\n"}
    ran = run_program(program, **how, timeout_s=3 if outcome == "timeout" else 30)
    assert (ran.outcome, ran.output.decode()) == (outcome, output), ran


@pytest.mark.parametrize("response, program", [
    ("```python\n1\n```", "1"), ("```Python3\n1\n```", "1"), ("```PY \n1\n```", "1"), ("```\n1\n```", "1"), ("1", ""),
    ("```cpp\n1\n```", ""), ("```py x=1\n1\n```", "1"), ("```1```", ""), ("```\n1\n```\n```\n2\n```", "2"), ("", ""),
    ("```python\n1\n```\n```py\n2\n```", "2"), ("```py\n1\n```\n```\n2\n```", "1"), ("```py\n1\n`````", "1"),
    ("<think>\n```py\n1\n```\n</think>\n```py\n2\n```", "2"), ("```py\n1\n```\n</think>\nno", ""), ("```py\n1```", ""),
    ("<think>\n```py\n1\n```", "1"), ("</think>```py\n1\n```", "1"), ("```py\n1\n```\n```py\n2", "1"), ("```py\n1", ""),
    (" - a\n   ```py\n   if 1:\n     2\n   ```", "if 1:\n  2"), ("~~~py\n```\n~~~", "```"), ("```py\n~~~\n```", "~~~"),
    ("````py\n```py\n2\n```\n````", "```py\n2\n```"), ("```py\r\n1\r\n```", "1"), ("```py\n1\n```\n```c\n2\n```", "1"),
])  # fmt: skip
def test_the_program_of_a_response(response, program):
    assert extract_program(response) == program


@pytest.mark.parametrize("call", [
    lambda n: extract_program("```" + " " * 3 * n + "`"), lambda n: extract_program("~~~" + "a" * 3 * n + "`"),
    lambda n: extract_program("```py\n" * n), lambda n: extract_program("`" * n + "\n" + "~`" * n),
    lambda n: same_output("1", "1" * n + "x"), lambda n: same_output("1e9999 " * n, "1e-9999 " * n),
    lambda n: same_output("9" * 9 * n, "8" * 9 * n), lambda n: same_value(Decimal("9" * n), Decimal("1e9999")),
])  # fmt: skip
def test_hostile_text_is_read_in_linear_time(call):
    begin = time.process_time()
    call(20_000)
    assert time.process_time() - begin < 1  # quadratic: several seconds


SAME = [("5\n", "\n 5  \n\n"), ("1 2\n3", " 1  2 \r\n3"), ("", " \n"), ("0.333333", "0.3333334"), ("1", "1.0"),
        ("0.5", "0.500001"), ("0", "-0.000001"), ("1", "+1.0000009"), ("1e9", "1000000000"), ("2000000.5", "2000002"),
        ("5.", "05"), (".5", "0.5"), ("1e30", "1" + "0" * 30), ("nan", "nan"), ("1e99999", "1e99999"), ("-0", "0")]
OTHER = [("1\n2", "1 2"), ("1\n2", "1\n\n2"), ("1\n2", "1"), ("1", "1\n2"), ("1 2", "1 2 3"), ("1 2 3", "1 2"),
         ("1 2", "2 1"), ("5", ""), ("", "0"), ("Yes", "yes"), ("ab", "a b"), ("0.333333", "0.334"), ("1", "1.000002"),
         ("0.5", "0.5000011"), ("0", "0.0000011"), ("100000000", "100000001"), ("9" * 40, "9" * 39 + "8"), ("1", "-1"),
         ("2000000.5", "2000003"), ("5", "nan"), ("nan", "5"), ("1e30", "1.0000001e30"), ("0", "inf"), ("16", "0x10"),
         ("1000", "1_000"), ("1", "True"), ("1e99999", "2e99999"), ("1", "1e"), ("0.1", "0,1")]  # fmt: skip
SAME_JSON = ["0.3 0.30000000000000004", "true 1", "0 false", "null null", '{"a":1,"b":[]} {"b":[],"a":1}', '"1" "1"',
             "1 1.0000009", "1e22 10000000000000000000000", "[[1],[2.5]] [[1],[2.5000001]]"]  # fmt: skip
OTHER_JSON = ["[0,1] [0]", "[0] [0,1]", "[5,6] 5", "[5] 5", "5 [5]", '1 "1"', '"1" "1.0"', "null 0", "[] {}",
              '{"a":1} {"a":1,"b":2}', '{"a":1,"b":2} {"a":1}', '{"a":[1]} {"a":[2]}', "5 NaN", "NaN NaN", "-1 1",
              f"{10**18} {10**18 + 1}", f"{'9' * 40} {'9' * 39}8", "0.5 0.5000011", "1 1.000002", "[1,2] [2,1]"]


def test_equal_output_and_equal_values():
    assert [pair for pair in SAME if not same_output(*pair)] == [pair for pair in OTHER if same_output(*pair)] == []
    read = [[json.loads(text, parse_int=Decimal, parse_float=Decimal) for text in pair.split()]
            for pair in SAME_JSON + OTHER_JSON]  # fmt: skip
    assert [same_value(*pair) for pair in read] == [True] * len(SAME_JSON) + [False] * len(OTHER_JSON)


def test_tests_are_read_in_both_formats(tmp_path):
    published = {"fn_name": "f", "inputs": ["1\n[2]\n", '"a"\n{}'], "outputs": ["3", [4]]}
    plain = {"kind": "call", "entry_point": "f", "inputs": [[1, [2]]], "outputs": [None]}
    rows = {"input_output": json.dumps(SUMS)}, {"input_output": json.dumps(published), "task": "code"}, {"tests": plain}
    problems = load_problems(write(tmp_path / "good", *({"prompt": "p", **row} for row in rows)))
    assert [problem.tests for problem in problems] == [
        SUMS, {"function": "f", "inputs": ["[1, [2]]", '["a", {}]'], "outputs": ["3", "[4]"]},
        {"function": "f", "inputs": ["[1, [2]]"], "outputs": ["null"]}]  # fmt: skip
    assert "tests" not in problems[2].row and problems[0].task == "code"


@pytest.mark.parametrize("row, reason", [
    ({"task": "code", "answer": "4"}, "KeyError"), ({"tests": None}, "TypeError"), ({"input_output": "{"}, "JSON"),
    ({"input_output": "[" * 10**5}, "Recursion"), ({"tests": {"inputs": [], "outputs": []}}, "without tests"),
    ({"tests": {"entry_point": 5, "inputs": [[1]], "outputs": [1]}}, ""), ({"tests": {"inputs": ["1"]}}, "'outputs'"),
    ({"tests": {"inputs": ["1"], "outputs": [2]}}, "all text"), ({"tests": {"inputs": "1", "outputs": "2"}}, ""),
    ({"tests": {"entry_point": "f", "inputs": [1], "outputs": [1]}}, "lists"), ({"task": "sql", "tests": SUMS}, "sql"),
    ({"tests": {"entry_point": "f", "inputs": [[1]], "outputs": "5"}}, ""), ({"tests": SUMS | {"inputs": []}}, "many"),
    ({"input_output": {"fn_name": "f", "inputs": ["no JSON"], "outputs": ["1"]}}, "JSON"),
])  # fmt: skip
def test_tests_that_cannot_be_read_are_refused_with_file_line_and_reason(tmp_path, row, reason):
    file = write(tmp_path / "bad", {"prompt": "p", "tests": SUMS}, {"prompt": "p", **row})
    with pytest.raises(ValueError, match=f"^{file}:2: .*{reason}"):
        load_problems(file)


@needs
def test_verdicts_are_told_apart_and_programs_judged_by_the_dozen():
    wanted = {"print(5)": "wrong", "1/0": "crashed", "print('x' * (2 << 20))": "crashed", "print(": "unparsed",
              FOREVER: "timeout", f"import time; time.sleep(1)\n{ADD[10:-4]}": "right", "": "no_answer"}  # fmt: skip

    async def score(problem, *responses):
        return await asyncio.gather(*(scorer.score(problem, response) for response in responses))

    with contextlib.closing(Scorer(CONFIG)) as scorer:
        found = asyncio.run(score(PROBLEM, *(f"```py\n{program}\n```" for program in wanted), "words"))
        assert found == [(float(verdict == "right"), verdict) for verdict in [*wanted.values(), "no_answer"]]
        speeds, short = [], Problem("q", "q", tests={name: value[:1] for name, value in SUMS.items()})
        for _ in range(3):
            begin = time.perf_counter()
            assert asyncio.run(score(short, *[ADD] * 40)) == [(1.0, "right")] * 40
            speeds.append(40 / (time.perf_counter() - begin))
    print(f"{max(speeds):.0f} programs a second, a test each, on two workers")
    assert max(speeds) > 10  # 20 and more where nothing else runs


@needs
def test_time_of_all_tests_together_is_bounded_and_no_test_is_not_a_pass():
    begin, slow = time.monotonic(), "```py\nimport time; time.sleep(0.5)\n```"
    assert code_verdict(slow, {"function": "", "inputs": [""] * 60, "outputs": [""] * 60}, 5, 1.5, False) == "timeout"
    assert time.monotonic() - begin < 10  # of thirty
    assert code_verdict(ADD, {"function": "", "inputs": ["2 3"], "outputs": ["\ud800"]}, 30, 60, False) == "wrong"
    assert code_verdict(ADD, {"function": "", "inputs": [], "outputs": []}, 30, 60, False) == "wrong"
    large = {"function": "f", "inputs": [f"[{10**18}]"], "outputs": [f"{10**18}"]}  # the next integer is not equal
    assert code_verdict("```py\ndef f(x): return x + 1\n```", large, 30, 60, False) == "wrong"


def test_without_bubblewrap_programs_are_refused_unless_told_otherwise(tmp_path, monkeypatch):
    assert "no Python" not in sandbox_fault()  # then the sandbox is broken, and most of these tests are skipped
    monkeypatch.setenv("PATH", str(tmp_path))
    file = write(tmp_path / "rows", ROW, {**ROW, "id": "second", "expected": False})
    status, out, err = check(file)
    assert (status, out, err.count("\n")) == (1, "", 1) and "apt install bubblewrap" in err and "--unsafe_code" in err
    status, out, _ = check(file, "--unsafe_code")
    edge, warning, _, *rest = out.splitlines()
    assert edge == "#" * 100 and "UNSAFE CODE" in warning and status == 1
    assert rest == [f"{file}:2: second: right, expected not right", "1 right, 1 wrong"]


def test_a_sandbox_that_cannot_be_made_is_an_error_and_no_verdict(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for end in ("kill -9 $$", "exit 0", "exit 1"):
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\necho no namespaces >&2\n{end}\n")
        (tmp_path / "bwrap").chmod(0o755)
        with pytest.raises(SandboxError, match="no namespaces"):
            code_verdict(ADD, SUMS, 30, 60, False)
    with contextlib.closing(Scorer(CONFIG)) as scorer, pytest.raises(ScorerError, match="no namespaces"):
        asyncio.run(scorer.score(PROBLEM, ADD))
    status, out, err = check(write(tmp_path / "row", ROW))
    assert (status, out) == (1, "") and "no namespaces; --unsafe_code" in err
