"""Two hosts on one machine: each has a network, processes, mounts, shared memory and a name of its
own. What they share is the file system. Root alone may make them (`ip`, `unshare`)."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = {"a": "10.93.0.1", "b": "10.93.0.2"}
PORT = 29591


@contextmanager
def two_hosts():
    """They are there, and can reach each other."""
    _remove()
    try:
        for host in ADDRESSES:
            _ip(f"netns add tllm-{host}")
        _ip("link add tllm-a type veth peer name tllm-b")
        for host, address in ADDRESSES.items():
            _ip(f"link set tllm-{host} netns tllm-{host}")
            _ip(f"-n tllm-{host} addr add {address}/24 dev tllm-{host}")
            _ip(f"-n tllm-{host} link set lo up")
            _ip(f"-n tllm-{host} link set tllm-{host} up")
        yield
    finally:
        _remove()


def on(host):
    """What a command begins with to run on a host; all of it ends with the command."""
    apart = "unshare --kill-child --mount --uts --pid --fork --mount-proc"
    begin = f'hostname {host}; mount -t tmpfs tmpfs /dev/shm; exec "$@"'
    return [*f"ip netns exec tllm-{host} {apart} sh -c".split(), begin, "sh"]


def environment(host):
    """Of what runs on a host: which address is its own, and which core it computes on."""
    return {
        "VLLM_HOST_IP": ADDRESSES[host],
        "GLOO_SOCKET_IFNAME": f"tllm-{host}",
        "VLLM_CPU_OMP_THREADS_BIND": str(sorted(ADDRESSES).index(host)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }


def layout(options):
    """Arguments of an engine of which the half is on host b; it is started on host a."""
    where = {"nnodes": 2, "node_rank": 0, "master_addr": ADDRESSES["a"], "master_port": PORT}
    return {**options, **where, "distributed_executor_backend": "mp"}


@contextmanager
def other_half(model, options, log, variables):
    """Host b has its half of an engine with these arguments; those of `layout` among them."""
    given = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={_text(value)}")
        for name, value in {**options, "node_rank": 1}.items()
        if value is not False
    ]
    tllm = Path(sys.executable).with_name("tllm")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*on("b"), tllm, "serve", model, "--headless", *given],
            env=variables | environment("b"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()


def _text(value):
    return value if isinstance(value, str) else json.dumps(value)


def _ip(arguments):
    subprocess.run(["ip", *arguments.split()], check=True)


def _remove():
    for host in ADDRESSES:
        subprocess.run(["ip", "netns", "del", f"tllm-{host}"], stderr=subprocess.DEVNULL)
