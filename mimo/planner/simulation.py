"""Event simulation of one training step: when each worker computes, and when it waits for others. Plain Python.

Each worker stands for the ranks of one module, pipeline stage and lane, which do the same at the same time. It has a
program: a list of actions in the order in which the trainer's own schedule performs them. A transfer is a key that one
or more workers post. A worker that awaits the key continues once all of them have posted it. NCCL's transfers between
stages block both sides, so for these both sides post and await the same key.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"


class Action(NamedTuple):
    """One entry of a program.

    Attributes:
        seconds: work before anything is posted.
        posts: keys that the worker posts when its work is done.
        awaits: keys that it waits for after that.
        label: name of the work, by which `Timeline.busy_s` sums it up.
        host_s: time that the host needs to launch the work. It may begin when the device begins the work before this
            one, because the device's queue holds about as many kernels as a pass has.
    """

    seconds: float = 0.0
    posts: tuple[Hashable, ...] = ()
    awaits: tuple[Hashable, ...] = ()
    label: str = ""
    host_s: float = 0.0


@dataclass
class Timeline:
    """Result of a simulation.

    Attributes:
        end_s: time at which each worker is done.
        busy_s: seconds of work of each worker, by label.
    """

    end_s: dict[Hashable, float] = field(default_factory=dict)
    busy_s: dict[Hashable, dict[str, float]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Time at which the last worker is done."""
        return max(self.end_s.values(), default=0.0)

    @property
    def last(self) -> Hashable:
        """The worker that is done last."""
        return max(self.end_s, key=lambda worker: self.end_s[worker])


def simulate(programs: Mapping[Hashable, Sequence[Action]], transfer_s: Callable[[Hashable], float] | None = None
             ) -> Timeline:
    """Run all programs from time 0.

    Args:
        programs: the program of each worker.
        transfer_s: returns the seconds between the last post of a key and the moment at which workers that await it
            continue; None: no time.

    Raises:
        ValueError: workers wait for each other, or for a key that nobody posts.
    """
    # A key is done when all workers that post it have posted it: how many have not, and when the last one did.
    posters = Counter(key for program in programs.values() for action in program for key in action.posts)
    left = {key: [count, 0.0] for key, count in posters.items()}
    done: dict[Hashable, float] = {}
    waiting: dict[Hashable, list[_Worker]] = defaultdict(list)
    workers = {name: _Worker(program) for name, program in programs.items()}
    ready = deque(workers.values())
    while ready:
        worker = ready.popleft()
        while worker.position < len(worker.program):
            action = worker.program[worker.position]
            # A worker that had to wait comes back to the same action, whose work is done.
            if not worker.has_worked:
                worker.work(action)
                for key in action.posts:
                    state = left[key]
                    state[0] -= 1
                    state[1] = max(state[1], worker.time)
                    if not state[0]:
                        done[key] = state[1] + (transfer_s(key) if transfer_s is not None else 0.0)
                        ready.extend(waiting.pop(key, ()))
            missing = worker.proceed(action, done)
            if missing is not None:
                waiting[missing].append(worker)
                break
    stuck = {name: worker.program[worker.position].awaits for name, worker in workers.items()
             if worker.position < len(worker.program)}
    if stuck:
        raise ValueError(f"the workers wait for each other: {stuck}")
    return Timeline({name: worker.time for name, worker in workers.items()},
                    {name: worker.busy_s for name, worker in workers.items()})


@dataclass(slots=True)
class _Worker:
    """A worker in the middle of a simulation.

    Attributes:
        program: its program.
        position: index of its action.
        has_worked: whether the work of this action is done.
        time: when it is done with what it has done so far.
        began: when the device began the last work.
        launched: when the host had launched the last work.
        busy_s: seconds of work by label.
    """

    program: Sequence[Action]
    position: int = 0
    has_worked: bool = False
    time: float = 0.0
    began: float = 0.0
    launched: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)

    def work(self, action: Action) -> None:
        """Do the work of an action."""
        self.has_worked = True
        if action.seconds:
            self.launched = max(self.launched, self.began) + action.host_s
            self.began = self.time
            self.time = max(self.time + action.seconds, self.launched)
            self.busy_s[action.label] = self.busy_s.get(action.label, 0.0) + action.seconds

    def proceed(self, action: Action, done: Mapping[Hashable, float]) -> Hashable | None:
        """Go on to the next action if all that this one awaits is done. Returns a key that is not, or None."""
        time = self.time
        for key in action.awaits:
            at = done.get(key)
            if at is None:
                return key
            time = max(time, at)
        self.time, self.has_worked = time, False
        self.position += 1
        return None


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int, *, run_ahead: int = 0) -> list[
        tuple[str, int]]:
    """Return the order of a stage's passes in the 1F1B schedule (PipeDream-Flush, arXiv:2006.09503).

    With `run_ahead`, the stage runs so many forward passes earlier than in 1F1B.

    Returns:
        `(FORWARD or BACKWARD, microbatch)` for each pass.
    """
    warmup = min(num_stages - stage - 1 + run_ahead, num_microbatches)
    order = [(FORWARD, microbatch) for microbatch in range(warmup)]
    for microbatch in range(warmup, num_microbatches):
        order += [(FORWARD, microbatch), (BACKWARD, microbatch - warmup)]
    return [*order, *((BACKWARD, microbatch) for microbatch in range(num_microbatches - warmup, num_microbatches))]


class Work(NamedTuple):
    """A pass: seconds on the device, and seconds in which the host launches it."""

    seconds: float = 0.0
    host_s: float = 0.0

    def and_then(self, other: Work) -> Work:
        return Work(self.seconds + other.seconds, self.host_s + other.host_s)


Hook = Callable[[int], Iterable[Action]]


def _nothing(microbatch: int) -> Iterable[Action]:
    return ()


@dataclass
class Stage:
    """One pipeline stage of one lane (or of all lanes that an encoder replica serves).

    Attributes:
        stage, num_stages: its position in the pipeline, counted over all modules that follow each other.
        num_microbatches: microbatches of the iteration.
        work: returns a pass, by kind (`FORWARD`, `BACKWARD`) and microbatch.
        inputs, outputs: names of the links to the stages before and after; several if lanes share an encoder.
        label: label of its work, see `Action`.
        sends_gradients: whether gradients go back to the stage before this one.
        takes_gradients: whether gradients come from the stage after this one.
        run_ahead: see `one_forward_one_backward`.
        prefetch: microbatches by which a frozen encoder works ahead, between its other passes; 0: it does not. The
            features of as many microbatches are there when the iteration begins. At the end, the encoder works on the
            next iteration, whose microbatches are taken to be those of this one. With Transformer Engine on GPUs, it
            shares a stream with the other passes, so the features that are sent next wait for it.
        buffered: links on which a send does not wait for the receiver.
        before_forward, after_forward, after_backward: actions around the passes of a microbatch.
        before_backward: actions before the gradient of a microbatch is received in a call of its own.
    """

    stage: int
    num_stages: int
    num_microbatches: int
    work: Callable[[str, int], Work]
    inputs: tuple[Hashable, ...] = ()
    outputs: tuple[Hashable, ...] = ()
    label: str = ""
    sends_gradients: bool = True
    takes_gradients: bool = True
    run_ahead: int = 0
    prefetch: int = 0
    buffered: tuple[Hashable, ...] = ()
    before_forward: Hook = _nothing
    after_forward: Hook = _nothing
    after_backward: Hook = _nothing
    before_backward: Hook = _nothing

    def program(self) -> list[Action]:
        """Return the stage's actions, with Megatron Core's fused sends and receives."""
        order = one_forward_one_backward(self.stage, self.num_stages, self.num_microbatches, run_ahead=self.run_ahead)
        first_steady = min(self.num_stages - self.stage - 1 + self.run_ahead, self.num_microbatches)
        actions: list[Action] = []
        for number, (kind, microbatch) in enumerate(order):
            following = order[number + 1] if number + 1 < len(order) else None
            if number == 0:
                actions.append(self._call(received=(kind, microbatch)))
            if kind == FORWARD:
                actions += self.before_forward(microbatch)
            if kind == FORWARD and self.prefetch:
                actions += [self._ahead(microbatch - 1)] if microbatch else ()
            else:
                actions.append(self._work(kind, microbatch))
            actions += (self.after_forward if kind == FORWARD else self.after_backward)(microbatch)
            # In the steady state, a send and the next receive are one call. Otherwise they are two.
            in_warmup = kind == FORWARD and microbatch < first_steady
            fused = following is not None and following[0] != kind and not in_warmup
            if fused:
                actions.append(self._call(sent=(kind, microbatch), received=following))
            else:
                actions.append(self._call(sent=(kind, microbatch)))
                if following is not None:
                    actions += self.before_backward(following[1]) if following[0] == BACKWARD else ()
                    if self.prefetch and following == (BACKWARD, self.num_microbatches - 1):
                        actions.append(self._ahead(self.num_microbatches - 1))
                    actions.append(self._call(received=following))
        return [action for action in actions if action.seconds or action.posts or action.awaits]

    def _ahead(self, sent: int) -> Action:
        """Return the pass that fills the queue again after a microbatch was sent."""
        return self._work(FORWARD, (sent + self.prefetch) % self.num_microbatches)

    def _work(self, kind: str, microbatch: int) -> Action:
        seconds, host_s = self.work(kind, microbatch)
        return Action(seconds, label=self.label, host_s=host_s)

    def _call(self, sent: tuple[str, int] | None = None, received: tuple[str, int] | None = None) -> Action:
        posts: list[Hashable] = []
        awaits: list[Hashable] = []
        for transfer, forwards, backwards in (
                (sent, self.outputs, self.inputs if self.sends_gradients else ()),
                (received, self.inputs, self.outputs if self.takes_gradients else ())):
            if transfer is not None:
                keys = [(link, *transfer) for link in (forwards if transfer[0] == FORWARD else backwards)]
                # A blocking sender needs to know that the receiver is there, so both sides post.
                posts += keys
                awaits += [key for key in keys if transfer is received or key[0] not in self.buffered]
        return Action(posts=tuple(posts), awaits=tuple(awaits))


def links_of(name: Hashable, stage: int, num_stages: int) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
    """Return the links of a stage to those before and after it."""
    return (((name, stage - 1),) if stage else (), ((name, stage),) if stage < num_stages - 1 else ())
