"""Node 0 of a group over several machines: listens for the agents of the others, and has them start their ranks.

It lives as long as its executor, so that a node that comes back finds it. Whoever connects must first prove that it
holds the key; one that does and was told of another number of nodes stops the start.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from saggar.engine.config import Nodes, Patience
from saggar.engine.errors import LoadError, Unsupported, WorkerDied
from saggar.engine.executor.away import AwayRank, Node
from saggar.engine.executor.keyed import HANDSHAKE_S, Gone, Line, Lines, Refused, accept, read_key

log = logging.getLogger(__name__)
_TICK_S = 0.25
_MOST_GREETED = 64
"""Connections that have not said yet who they are; more are closed."""


class Head:
    """`launch` and `close` are called by one thread at a time. Unsupported: no key, or the address is not this
    machine's.
    """

    def __init__(self, nodes: Nodes, ranks_per_node: int, patience: Patience) -> None:
        self._nodes = nodes
        self._per_node = ranks_per_node
        self._patience = patience
        self._key = read_key(nodes.key_file)
        self._changed = threading.Condition(threading.RLock())
        self._here: dict[int, Node] = {}
        self._arrived: dict[tuple[int, int, str], socket.socket] = {}
        self._groups = 0
        self._wrong: str | None = None
        self._greeting: dict[threading.Thread, socket.socket] = {}
        self._listener = _listen(nodes)
        self._bell, self._ringer = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="saggar-head", daemon=True)
        self._thread.start()

    def launch(self, idle: Callable[[], None]) -> list[tuple[AwayRank, socket.socket]]:
        """The ranks of all other nodes in their order, each with the socket of its link to rank 0.

        Waits for nodes that are not there, however long; `idle` is called now and then. WorkerDied: a node was lost in
        between; LoadError: it was told of another number of nodes.
        """
        with self._changed:
            # At a restart a stranger that came meanwhile is no reason; at the first start it may have been quicker.
            self._wrong = None if self._groups else self._wrong
        nodes = self._gather(idle)
        with self._changed:
            self._groups += 1
            group = self._groups
            self._forget_arrived()
        for node in nodes:
            node.launch(group, self._ranks_of(node))
        found = []
        try:
            for node in nodes:
                self._wait(lambda node=node: self._launched(node, group), idle)  # type: ignore[misc]
                found += [self._take(node, group, rank) for rank in self._ranks_of(node)]
        except BaseException:
            for away, link in found:
                link.close()
                away.kill()
            for node in nodes:
                node.kill(group)
            raise
        return found

    def close(self) -> None:
        """All agents hear that their ranks end. Again: nothing happens."""
        self._ringer.close()
        self._thread.join()
        self._bell.close()
        self._listener.close()
        with self._changed:
            greeting = dict(self._greeting)
        for thread, sock in greeting.items():
            with contextlib.suppress(OSError):  # it may be done
                sock.shutdown(socket.SHUT_RDWR)
            thread.join()
        with self._changed:
            here, self._here = self._here, {}
            self._forget_arrived()
        for node in here.values():
            node.close()

    # -- a group

    def _gather(self, idle: Callable[[], None]) -> list[Node]:
        numbers = range(1, self._nodes.count)
        missing = [number for number in numbers if number not in self._here]
        if missing:
            log.info("waiting at %s for node %s", self._nodes.address, ", ".join(map(str, missing)))
        self._wait(lambda: all(number in self._here for number in numbers), idle)
        with self._changed:
            nodes = [self._here.get(number) for number in numbers]
        if not all(nodes):
            return self._gather(idle)  # one left while the others came
        return [node for node in nodes if node is not None]

    def _wait(self, condition: Callable[[], bool], idle: Callable[[], None]) -> None:
        while True:
            with self._changed:
                if self._wrong is not None:
                    wrong, self._wrong = self._wrong, None
                    raise LoadError(wrong)
                if self._changed.wait_for(condition, _TICK_S):
                    return
            idle()

    def _ranks_of(self, node: Node) -> Sequence[int]:
        return range(node.number * self._per_node, (node.number + 1) * self._per_node)

    def _launched(self, node: Node, group: int) -> bool:
        said = node.said(group)
        if said.failed or node.lost:
            raise WorkerDied(f"node {node.number} started no ranks: {said.failed or node.lost}")
        return bool(said.pids)

    def _take(self, node: Node, group: int, rank: int) -> tuple[AwayRank, socket.socket]:
        with self._changed:
            control, link = (self._arrived.pop((group, rank, kind)) for kind in ("control", "link"))
            pid = node.said(group).pids[rank]
        return AwayRank(rank, node, group, pid, control, self._changed), link

    def _forget_arrived(self) -> None:
        for sock in self._arrived.values():
            sock.close()
        self._arrived.clear()

    # -- who connects

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._bell.fileno() in ready:
                return
            try:
                sock, peer = self._listener.accept()
            except OSError as error:  # it has gone already, or there are no descriptors left
                log.warning("a connection could not be accepted: %s", error)
                time.sleep(_TICK_S)
                continue
            if len(self._greeting) >= _MOST_GREETED:
                sock.close()
                continue
            thread = threading.Thread(target=self._greet, args=(sock, str(peer[0])), daemon=True)
            with self._changed:
                self._greeting[thread] = sock
            thread.start()

    def _greet(self, sock: socket.socket, peer: str) -> None:
        """In a thread of its own: one that says nothing holds up nobody."""
        try:
            lines = Lines(accept(sock, self._key))
            line = lines.receive(HANDSHAKE_S)
            if line is None:
                raise Gone("it said nothing")
            self._admit(lines, line, peer)
        except Refused as refused:
            log.warning("a connection from %s was refused: %s", peer, refused)
        except Gone as gone:
            log.warning("a connection from %s ended: %s", peer, gone)
            sock.close()
        finally:
            with self._changed:
                del self._greeting[threading.current_thread()]

    def _admit(self, lines: Lines, line: Line, peer: str) -> None:
        if line.get("kind") == "node":
            self._admit_node(lines, line, peer)
            return
        group, rank, kind = line.get("group"), line.get("rank"), line.get("kind")
        with self._changed:
            if not isinstance(group, int) or not isinstance(rank, int) or group != self._groups:
                lines.close()  # of a group that is no more
                return
            self._arrived[(group, rank, str(kind))] = lines.release()
            # Only now: the agent may say that it has launched the moment it reads this.
            lines.send(ok=True)

    def _admit_node(self, lines: Lines, line: Line, peer: str) -> None:
        number, count, model = line.get("node"), line.get("nodes"), line.get("model")
        if count != self._nodes.count or not isinstance(number, int) or not 0 < number < self._nodes.count:
            text = f"node {number} at {peer} was told of {count} nodes; this group has {self._nodes.count}"
            log.error("%s", text)
            lines.send(refused=text)
            lines.close()
            with self._changed:
                self._wrong = text
                self._changed.notify_all()
            return
        with self._changed:
            if number in self._here:
                lines.send(busy=f"node {number} is here already")
                lines.close()
                return
            lines.send(ok=True, patience=asdict(self._patience))
            found = model if isinstance(model, str) else None
            self._here[number] = Node(number, lines, found, self._patience, self._changed, self._lost)
            self._changed.notify_all()
        log.info("node %d is here, from %s", number, peer)

    def _lost(self, node: Node, reason: str) -> None:
        log.warning("node %d is lost: %s", node.number, reason)
        with self._changed:
            if self._here.get(node.number) is node:
                del self._here[node.number]
            self._changed.notify_all()


def _listen(nodes: Nodes) -> socket.socket:
    family = socket.AF_INET6 if ":" in nodes.host else socket.AF_INET
    try:
        return socket.create_server((nodes.host, nodes.port), family=family, backlog=64)
    except OSError as error:
        raise Unsupported(f"node 0 cannot listen at {nodes.address}: {error}") from error
