"""Blocks of ports: no two servers of a host share one."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys

import pytest

from app.launch import port_block
from app.launch.port_block import PortBlock
from engine.errors import ConfigError


def is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("", port))
        return True
    return False


@pytest.fixture
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has room for two servers, where no outgoing connection or other block gets a port."""
    starts = list(range(port_block.LAST, 32_768 - 8, 8))
    random.shuffle(starts)
    first = next(start for start in starts if all(map(is_free, range(start, start + 8))))
    monkeypatch.setattr(port_block, "SIZE", 4)
    monkeypatch.setattr(port_block, "FIRST", first)
    monkeypatch.setattr(port_block, "LAST", first + 8)


def test_blocks_do_not_overlap_and_come_back(two_blocks: None) -> None:
    one, two = PortBlock(), PortBlock()
    assert set(range(*one.take_range(3))).isdisjoint(range(*two.take_range(3)))
    with pytest.raises(ConfigError, match="are taken; stop another server"):
        PortBlock()
    one.release()
    PortBlock().release()
    two.release()


def test_a_port_that_is_in_use_is_passed_over(two_blocks: None) -> None:
    block = PortBlock()
    with socket.socket() as other:
        other.bind(("127.0.0.1", block._next))
        assert block.take() == other.getsockname()[1] + 1
    with pytest.raises(ConfigError, match="fewer than 2 ports are left"):
        block.take_range(2)
    block.release()


def test_a_process_that_is_killed_frees_its_block(two_blocks: None) -> None:
    here = PortBlock()
    hold = (
        "import sys\n"
        "from app.launch import port_block\n"
        f"port_block.FIRST, port_block.LAST, port_block.SIZE = {port_block.FIRST}, {port_block.LAST}, 4\n"
        "block = port_block.PortBlock()\n"
        "print('taken', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", hold], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(ConfigError, match="are taken"):
            PortBlock()
        other.kill()
    PortBlock().release()
    here.release()
