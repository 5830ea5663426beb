"""Kernels that attack the judge through what they share with it: their socket, their output, their memory.

Each is a file of its own, since some attack while they are loaded.
"""

BEGINNING = '''
import json, os, socket, stat, struct, sys, threading, time
import torch
from lastbit.kernel import kernel

def right(x, weight, eps):
    value = x.float()
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

def fd():
    """The socket, which whatever runs in this process can use."""
    numbers = map(int, os.listdir("/proc/self/fd"))
    return next(n for n in numbers if os.path.exists(f"/proc/self/fd/{n}") and stat.S_ISSOCK(os.fstat(n).st_mode))

def number():
    """What the judge knows the answer to its message by, as it stands in a frame of the runner."""
    frame = sys._getframe()
    while not (isinstance(message := frame.f_locals.get("message"), dict) and "number" in message):
        frame = frame.f_back
    return message["number"]

def say(content):
    """Answer in the place of the runner."""
    text = content if isinstance(content, bytes) else json.dumps(content | {"number": number()}).encode()
    os.write(fd(), struct.pack("!Q", len(text)) + text)

def result(**fields):
    known = {"name": "output", "dtype": "bfloat16", "device": "cpu", "at": 0, "shape": [4, 64], "strides": [64, 1]}
    return {"returned": [known | fields], "bytes": 512, "copied": True, "descended": False}
'''

_FUNCTION = "\n@kernel('rms_norm')\ndef attacking(x, weight, *, eps):\n    "
_RIGHT = "\n    return right(x, weight, eps)\n"


def _called(lines: str) -> str:
    return BEGINNING + _FUNCTION + lines.replace("\n", "\n    ") + _RIGHT


def _answering(content: str) -> str:
    return _called(f"say({content})")


NO_PASS = {
    "answers_before_it_has_results": _called("say(result())\ntime.sleep(0.2)"),
    "answers_for_the_next_call_too": _called("for _ in range(20): say(result())"),
    "says_that_it_found_something": _answering("result() | {'findings': [['wrote_outside', 'x', 'y' * 19000]] * 100}"),
    "says_that_memory_ran_out": _answering(
        "{'raised': {'kinds': ['MemoryError'], 'text': 'x', 'traceback': '', 'lost': False}}"
    ),
    "runs_out_of_memory_when_called_again": BEGINNING
    + "calls = []\n"
    + _called("calls.append(1)\nif len(calls) > 1: raise MemoryError('none left')").removeprefix(BEGINNING),
    "says_that_a_shape_is_nan": _answering("result(shape=[float('nan'), 64])"),
    "says_that_a_shape_is_negative": _answering("result(shape=[-4, -64])"),
    "says_that_a_result_lies_elsewhere": _answering("result(at=1 << 40)"),
    "says_that_rows_overlap": _answering("result(strides=[0, 1])"),
    "says_a_result_of_petabytes": _answering("result(shape=[1 << 46], strides=[1])"),
    "says_a_result_of_gigabytes": _answering("result(shape=[1 << 40], strides=[1])"),
    "says_a_dtype_that_torch_has_no_tensors_of": _answering("result(dtype='load')"),
    "says_another_dtype": _answering("result(dtype='float16')"),
    "says_a_device_that_is_not_there": _answering("result(device='hpu', at=-1, shape=[0], strides=[1])"),
    "says_no_json": _answering("b'\\xff' * 100"),
    "says_nested_json": _answering("b'[' * 1_000_000"),
    "says_a_number_of_megabytes": _answering("b'9' * 4_000_000"),
    "says_a_million_objects": _answering("b'{\"returned\": [' + b'{},' * 1_300_000 + b'{}]}'"),
    "says_more_than_it_may": _called("os.write(fd(), b'\\xff' * 4)\nos.write(fd(), b'x' * (6 << 20))"),
    "closes_its_socket": _called("os.close(fd())"),
    "shuts_its_socket_down": _called("socket.socket(fileno=fd()).shutdown(socket.SHUT_RDWR)"),
    "stops_its_process": _called("os.kill(os.getpid(), 19)"),
    "prints_and_never_ends": _called("while True: os.write(1, b'PASSED' * 10_000)"),
    "writes_over_its_result_later": BEGINNING
    + _FUNCTION
    + """out = right(x, weight, eps)
    threading.Thread(target=lambda: [out.zero_() for _ in iter(int, 1)], daemon=True).start()
    time.sleep(0.05)
    return out
""",
    "declares_what_is_not_in_the_file": BEGINNING
    + "say({'kernels': [{'name': 'attacking', 'file': '../../etc/passwd', 'depth': False}]})"
    + _FUNCTION
    + _RIGHT,
}
"""Name → file of a kernel that must not pass."""

NO_HARM = {
    "sends_descriptors": _called(
        "s = socket.socket(fileno=os.dup(fd()))\nfor _ in range(50): socket.send_fds(s, [b''], [0, 1, 2] * 20)"
    ),
    "prints_in_a_thread": _called(
        "threading.Thread(target=lambda: [os.write(1, b'y' * 65536) for _ in iter(int, 1)], daemon=True).start()"
    ),
    "leaves_deep_folders": BEGINNING
    + "for _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\nos.chdir(os.environ['HOME'])\n"
    + _FUNCTION
    + _RIGHT,
}
"""Name → file of a kernel that gives right values, and more than that."""
