# SPDX-License-Identifier: Apache-2.0
"""Waiting for workers with open eyes: a dead one is named at once, a hung one after a time-out, a lost cluster too.

`Supervisor` has `get`, `wait` and `kill` as the module `ray` has them, and whoever waits for workers does it through these.
While it waits it watches all workers, not only the ones waited for. `Member` stands for an actor handle:
`member.train.remote(...)`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from unirl.distributed.cluster import lost_processes
from unirl.distributed.failures import (
    ClusterLost,
    WorkerDied,
    WorkerFailure,
    WorkerHung,
    died,
    last_lines,
    last_point,
    quoted_log,
)
from unirl.distributed.member import Call, Member

TICK_S = 0.5
"""The longest that a look at the workers is put off while something is waited for."""
LOOK_S = 0.2
"""The shortest time between two looks, for callers that poll."""
GRACE_S = 2.0
"""How long a failed rank's peers are given to show that one of them died, which is then the cause."""
START_TIMEOUT_S = 600.0
"""What a process may take to start, with libraries read from a slow disk, however small `timeout_s` is."""
PULSE_S = 2.0
"""Seconds between two heartbeats that are asked for."""


class Supervisor:
    """Watches `members`.

    Args:
        timeout_s: seconds without any progress after which a worker that was asked for something counts as hung; 0: never.
        max_restarts: how often, in the whole run, a dead worker that can be revived is started again.
        notice: told of each restart.
    """

    def __init__(
        self, *, timeout_s: float = 0.0, max_restarts: int = 0, notice: Callable[[str], None] = print
    ) -> None:
        self.members: list[Member] = []
        self.timeout_s, self.restarts_left, self.notice = timeout_s, max_restarts, notice
        self.num_restarts = 0
        self.num_spared = 0
        self.failure: WorkerFailure | ClusterLost | None = None
        self._calls: dict[Any, Call] = {}
        self._made_again: dict[Any, tuple[Call, int]] = {}
        self._looked = 0.0

    def add(self, member: Member) -> Member:
        """Takes a worker under supervision; its calls go through here from now on."""
        member.submit = self._submit
        self.members.append(member)
        return member

    # ---- what `ray` has

    def get(self, refs: Any) -> Any:
        """The values of a reference or of a list of them.

        Raises what a call raised as soon as one of them has, `WorkerDied` when a worker is gone, `WorkerHung`, `ClusterLost`.
        A call of a worker that was restarted meanwhile is made again, and its new result is the one that counts.
        """
        self._refuse_if_failed()
        several = isinstance(refs, list)
        wanted = list(refs) if several else [refs]
        values: dict[Any, Any] = {}
        while waiting := [ref for ref in wanted if ref not in values]:
            standing = {self.current(ref): ref for ref in waiting}
            ready, _ = ray.wait(list(standing), num_returns=1, timeout=TICK_S)
            for ref in ready:
                try:
                    values[standing[ref]] = ray.get(ref)
                    self._settle(ref)
                except RayTaskError as error:
                    self._raise_the_cause(error, [r for r in standing if r != ref])
                except RayActorError as error:
                    self._see_death(ref, error)
            self._look()
        return [values[ref] for ref in wanted] if several else values[refs]

    def wait(
        self,
        refs: Sequence[Any],
        *,
        num_returns: int = 1,
        timeout: float | None = None,
        fetch_local: bool = True,
    ) -> tuple[list[Any], list[Any]]:
        """As `ray.wait`: (ended, not yet). A call that failed has ended."""
        self._refuse_if_failed()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            standing = {self.current(ref): ref for ref in refs}
            left = TICK_S if deadline is None else min(TICK_S, max(0.0, deadline - time.monotonic()))
            ready, _ = ray.wait(
                list(standing), num_returns=num_returns, timeout=left, fetch_local=fetch_local
            )
            self._look()
            if len(ready) >= num_returns or (deadline is not None and time.monotonic() >= deadline):
                ended = [standing[ref] for ref in ready]
                return ended, [ref for ref in refs if ref not in ended]

    def kill(self, member: Member) -> None:
        """Ends a worker for good; its end is no failure any more."""
        if member in self.members:
            self.members.remove(member)
        for ref in [ref for ref, call in self._calls.items() if call.member is member]:
            del self._calls[ref]
        member.end()

    def current(self, ref: Any) -> Any:
        """The reference that stands for `ref` now: another one after its call was made again."""
        while ref in self._made_again:
            call, index = self._made_again[ref]
            if call.refs[index] == ref:
                break
            ref = call.refs[index]
        return ref

    def forget(self, refs: Sequence[Any]) -> None:
        """Says that `current` will not be asked about these again, so that what they stand for can be freed."""
        for ref in refs:
            self._made_again.pop(ref, None)

    def end(self) -> None:
        """Ends all workers."""
        members, self.members = self.members, []
        for member in members:
            member.end()

    # ---- calls

    def _submit(self, member: Member, method: str, args: tuple[Any, ...], num_returns: int) -> Any:
        call = Call(member, method, args, num_returns)
        call.submit()
        self._calls[call.refs[0]] = call
        return call.refs[0] if num_returns == 1 else list(call.refs)

    def _settle(self, ref: Any) -> None:
        call = self._calls.pop(ref, None)
        if call is not None:
            call.args = ()

    def _open_calls(self, member: Member) -> list[Call]:
        """Calls on a worker that have not ended, oldest first; ended ones that nobody will ask for again are forgotten."""
        own = {ref: call for ref, call in self._calls.items() if call.member is member}
        if not own:
            return []
        ended, _ = ray.wait(list(own), num_returns=len(own), timeout=0, fetch_local=False)
        for ref in ended:
            if member.revive is None or self.restarts_left == 0:
                del self._calls[ref]
        return [call for ref, call in own.items() if ref not in ended]

    # ---- looking after the workers

    def _look(self, *, now: bool = False) -> None:
        clock = time.monotonic()
        if not now and clock - self._looked < LOOK_S:
            return
        self._looked = clock
        if lost := lost_processes():
            self._fail(ClusterLost(f"the Ray cluster is gone: {lost} ended unexpectedly"))
        if not self.members:
            return
        lifelines = {m.lifeline: m for m in self.members}
        cut, _ = ray.wait(list(lifelines), num_returns=len(lifelines), timeout=0)
        for lifeline in cut:
            try:
                ray.get(lifeline)
            except RayActorError as error:
                self._lost(lifelines[lifeline], error)
        self._feel_pulses(clock)

    def _feel_pulses(self, clock: float) -> None:
        still: list[tuple[float, Member, str]] = []
        for member in self.members:
            try:
                age_s, answered = member.feel_pulse(clock, every_s=PULSE_S)
            except RayActorError:
                continue  # it died just now; the next look says so
            calls = self._open_calls(member)
            if calls and self.timeout_s:
                still_s = min(age_s, clock - calls[0].began)  # before it was asked it had no reason to move
                if still_s > (self.timeout_s if member.started else max(self.timeout_s, START_TIMEOUT_S)):
                    still.append((still_s, member, "" if answered else " and does not answer"))
        if still:
            age_s, member, silent = max(still, key=lambda found: found[0])
            self._fail(self._hung(member, age_s, silent))

    def _hung(self, member: Member, age_s: float, silent: str) -> WorkerHung:
        lines = last_lines(member.log)
        at = {m: last_point(last_lines(m.log)) or m.point for m in self.members}
        asked = " and ".join(dict.fromkeys(call.method for call in self._open_calls(member)))
        others = ", ".join(f"{m.name} at {at[m]}" for m in self.members if m is not member)
        return WorkerHung(
            member.name,
            at[member],
            f"{member.name} ({member.where}) has not moved for {age_s:.0f} s{silent} (worker_timeout_s: {self.timeout_s:g}): "
            f"asked for {asked}, it is at {at[member]}; the others: {others or 'none'}\n{quoted_log(member.log, lines)}",
        )

    def _see_death(self, ref: Any, error: RayActorError) -> None:
        call = self._calls.get(ref)
        if call is None:
            self._look(now=True)
            if self.current(ref) == ref:
                raise error  # of an actor that is not ours to watch
        elif call.refs[0] == ref:
            self._lost(call.member, error)

    def _lost(self, member: Member, error: RayActorError) -> None:
        """A worker is gone: restarts it, or raises."""
        if lost := lost_processes():
            self._fail(ClusterLost(f"the Ray cluster is gone: {lost} ended unexpectedly"))
        death = self._death(member, error)
        if member.revive is None or not self.restarts_left:
            self._go_on_without(member, death)
            return
        while True:
            self.restarts_left -= 1
            self.num_restarts += 1
            self.notice(f"{death}\nit is started again ({self.restarts_left} restart(s) left)")
            member.end()
            member.begin()
            try:
                assert member.revive is not None
                member.revive(lambda method, *args, member=member: self._ask(member, method, *args))
                break
            except RayActorError as again:
                death = self._death(member, again)
                if not self.restarts_left:
                    self._go_on_without(member, death)
                    return
        self._make_calls_again(member)

    def _go_on_without(self, member: Member, death: WorkerDied) -> None:
        """Raises, unless the others can do the worker's work: who waits for its calls then gets Ray's own error."""
        asked = [call.method for call in self._calls.values() if call.member is member]
        if member.spare is None or not member.spare(asked):
            self._fail(death)
        self.num_spared += 1
        self.notice(f"{death}\nthe others go on without it")
        self.kill(member)

    def _make_calls_again(self, member: Member) -> None:
        for ref, call in [(ref, call) for ref, call in self._calls.items() if call.member is member]:
            if _ended_well(ref):
                continue
            del self._calls[ref]
            old = call.refs
            call.submit()
            self._calls[call.refs[0]] = call
            self._made_again.update({ref: (call, index) for index, ref in enumerate(old)})

    def _ask(self, member: Member, method: str, *args: Any) -> Any:
        """A call on a worker that is being revived: waits for it alone."""
        ref = getattr(member.actor, method).remote(*args)
        begin = time.monotonic()
        while not ray.wait([ref], timeout=TICK_S)[0]:
            if self.timeout_s and time.monotonic() - begin > self.timeout_s:
                message = f"{member.name} was started again and did not get through {method} in {self.timeout_s:g} s"
                self._fail(WorkerHung(member.name, method, message))
            if lost := lost_processes():
                self._fail(ClusterLost(f"the Ray cluster is gone: {lost} ended unexpectedly"))
        return ray.get(ref)

    def _death(self, member: Member, error: RayActorError) -> WorkerDied:
        asked = " and ".join(
            dict.fromkeys(call.method for call in self._calls.values() if call.member is member)
        )
        with contextlib.suppress(RayActorError):
            member.locate()
        return died(member.name, asked or "no call", member.where, member.log, error)

    # ---- failing

    def _raise_the_cause(self, error: RayTaskError, peers: list[Any]) -> None:
        """Raises `error`, or what made it happen: a rank whose peer died sees a closed connection."""
        if peers:
            ray.wait(peers, num_returns=len(peers), timeout=GRACE_S)
        try:
            self._look(now=True)
        except (WorkerFailure, ClusterLost) as cause:
            cause.add_note(f"with it another worker failed: {type(error).__name__}: {error}")
            raise cause from None
        raise error

    def _fail(self, failure: WorkerFailure | ClusterLost) -> None:
        self.failure = failure
        raise failure from None

    def _refuse_if_failed(self) -> None:
        if self.failure is not None:
            raise RuntimeError(f"nothing is waited for after {type(self.failure).__name__}")


def _ended_well(ref: Any) -> bool:
    if not ray.wait([ref], timeout=0, fetch_local=False)[0]:
        return False
    try:
        ray.get(ref)
    except Exception:  # whatever it was, the call is made again and may raise it again
        return False
    return True
