"""Workers without a model: they execute plans on an arena of hashes, so that any wrong page shows.

Instead of keys and values a page keeps, per token, a running hash of the sequence up to it. Sampling reads
the hashes of the whole sequence back through the row's page table, all heads, and hashes them with the
request's seed. A page that was freed too early, shared wrongly or missed in a handover changes the tokens.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamictp.messages import (
    Body,
    CloseDomain,
    CommHandle,
    DomainClosed,
    DomainOpened,
    DomainProven,
    NewRow,
    OpenDomain,
    ProveDomain,
    RowPromptLogprobs,
    RowStep,
    RowToken,
    StepPlan,
    StepResult,
    TokenLogprobs,
    unpack_tokens,
)

_UNWRITTEN = 0xFFFFFFFF


class IllegalPlan(Exception):
    """The engine asked for something that no worker could do."""


def _chain(before: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), before)


def _sample(hashes: bytes, heads: int, seed: int, vocab: int) -> int:
    """The token after a sequence; `hashes` are those of its tokens, for each head one after the other."""
    digest = hashlib.blake2b(hashes, digest_size=8, key=seed.to_bytes(8, "little") + bytes([heads]))
    return int.from_bytes(digest.digest(), "little") % vocab


def _logprob(chain: int) -> float:
    return -chain / _UNWRITTEN


def reference_tokens(prompt: Sequence[int], seed: int, count: int, *, heads: int, vocab: int) -> list[int]:
    """What a fake worker samples after `prompt`, computed without pages."""
    hashes = array("I")
    last = 0
    for token in prompt:
        last = _chain(last, token)
        hashes.append(last)
    out: list[int] = []
    for _ in range(count):
        token = _sample(hashes.tobytes() * heads, heads, seed, vocab)
        out.append(token)
        last = _chain(last, token)
        hashes.append(last)
    return out


def reference_prompt_logprobs(prompt: Sequence[int]) -> list[float]:
    """Log-probabilities of the prompt's tokens from the second on."""
    last, out = 0, []
    for token in prompt:
        last = _chain(last, token)
        out.append(_logprob(last))
    return out[1:]


class FakeArena:
    """Pages shared by all workers of a node. `pages[p][i]` is the hash of the token at offset i."""

    def __init__(self, pages: int, page_tokens: int, heads: int) -> None:
        self.page_tokens = page_tokens
        self.heads = heads
        self.pages = [array("I", [_UNWRITTEN]) * page_tokens for _ in range(pages)]


@dataclass
class _Row:
    tokens: list[int]
    prompt_len: int
    seed: int
    logprobs: bool
    blocks: list[tuple[int, ...]]
    computed: int = -1


@dataclass
class _Rank:
    """This worker's part in a domain."""

    rank: int
    members: tuple[int, ...]
    comm: CommHandle
    rows: dict[int, _Row] = field(default_factory=dict)
    next_step: int = 0


class FakeWorker:
    """One device's worker. Rank r of n writes the heads h with h % n == r; all ranks read all heads.

    `begin` and `finish` are a step before and after the barrier between writing and reading pages.
    """

    def __init__(self, device: int, arena: FakeArena, vocab: int, incarnation: int = 1) -> None:
        self.device = device
        self.incarnation = incarnation
        self.domains: dict[int, _Rank] = {}
        self._arena = arena
        self._vocab = vocab

    def handle(self, body: Body) -> list[Body]:
        """Execute a message of a domain of one rank, or one that needs no peer."""
        match body:
            case OpenDomain():
                return [self._open(body)]
            case CloseDomain():
                rank = self.domains.pop(body.epoch, None)
                return [] if rank is None else [DomainClosed(body.epoch, rank.rank)]
            case ProveDomain():
                return self.prove(body)
            case StepPlan():
                self.begin(body)
                result = self.finish(body, 0.0)
                return [] if result is None else [result]
            case _:
                raise IllegalPlan(f"{type(body).__name__} is no message to a worker")

    def prove(self, body: ProveDomain) -> list[Body]:
        mine = self._next(body.epoch, body.step)
        return [DomainProven(body.epoch, 0, 0.1)] if mine.rank == 0 else []

    def begin(self, plan: StepPlan) -> None:
        """Take rows off and on, and write the hashes of this rank's heads."""
        mine = self._next(plan.epoch, plan.step)
        for row in plan.gone:
            if mine.rows.pop(row, None) is None:
                raise IllegalPlan(f"row {row} of epoch {plan.epoch} is gone twice")
        for new in plan.new:
            mine.rows[new.row] = self._new_row(mine, new)
        written: dict[tuple[int, int], int] = {}
        if len({step.row for step in plan.rows}) < len(plan.rows):
            raise IllegalPlan(f"step {plan.step} of epoch {plan.epoch} names a row twice")
        for step in plan.rows:
            self._write(mine, step, written)

    def finish(self, plan: StepPlan, seconds: float) -> StepResult | None:
        """Sample, after all ranks have written. The result is rank 0's."""
        mine = self.domains[plan.epoch]
        tokens: list[RowToken] = []
        prompts: list[RowPromptLogprobs] = []
        for step in plan.rows:
            row = mine.rows[step.row]
            row.computed = end = step.start + step.count
            if step.prompt_logprobs:
                hashes = self._read(row, end, 0)
                last = min(end, row.prompt_len - 1)
                entries = tuple(
                    TokenLogprobs(row.tokens[i], _logprob(_chain(hashes[i - 1], row.tokens[i])))
                    for i in range(step.start + 1, last + 1)
                )
                prompts.append(RowPromptLogprobs(step.row, step.start + 1, entries))
            if step.sample:
                if end != len(row.tokens):
                    raise IllegalPlan(f"row {step.row} samples after {end} of {len(row.tokens)} tokens")
                hashes_of_all = b"".join(self._read(row, end, h).tobytes() for h in range(self._arena.heads))
                token = _sample(hashes_of_all, self._arena.heads, row.seed, self._vocab)
                row.tokens.append(max(token, 0))
                logprobs = TokenLogprobs(token, -token / self._vocab) if row.logprobs else None
                tokens.append(RowToken(step.row, end, token, logprobs))
        if mine.rank:
            return None
        return StepResult(plan.epoch, plan.step, tuple(tokens), seconds, 0.0, tuple(prompts))

    # ------------------------------------------------------------ within

    def _open(self, body: OpenDomain) -> DomainOpened:
        if body.epoch in self.domains or body.members[body.rank] != self.device:
            raise IllegalPlan(f"device {self.device} can't be rank {body.rank} of epoch {body.epoch}")
        if any(known.comm.slot == body.comm.slot for known in self.domains.values()):
            raise IllegalPlan(f"slot {body.comm.slot} is in use by another domain of device {self.device}")
        self.domains[body.epoch] = _Rank(body.rank, body.members, body.comm)
        return DomainOpened(body.epoch, body.rank, 0.1, 0.2)

    def _next(self, epoch: int, step: int) -> _Rank:
        mine = self.domains.get(epoch)
        if mine is None:
            raise IllegalPlan(f"device {self.device} is not in epoch {epoch}")
        if step != mine.next_step:
            raise IllegalPlan(f"step {step} of epoch {epoch} after {mine.next_step - 1}")
        mine.next_step += 1
        return mine

    def _new_row(self, mine: _Rank, new: NewRow) -> _Row:
        if new.row in mine.rows:
            raise IllegalPlan(f"row {new.row} is in use")
        tokens = unpack_tokens(new.tokens)
        logprobs = new.sampling.logprobs is not None
        return _Row(tokens, new.prompt_len, new.sampling.seed, logprobs, list(new.blocks))

    def _write(self, mine: _Rank, step: RowStep, written: dict[tuple[int, int], int]) -> None:
        row = mine.rows.get(step.row)
        if row is None:
            raise IllegalPlan(f"row {step.row} is unknown")
        row.blocks.extend(step.new_blocks)
        end = step.start + step.count
        if row.computed not in {-1, step.start}:
            raise IllegalPlan(f"row {step.row} goes on at {step.start}, {row.computed} tokens are computed")
        if step.count < 1 or end > len(row.tokens):
            raise IllegalPlan(f"row {step.row} of {len(row.tokens)} tokens computes {step.start}…{end}")
        size = self._arena.page_tokens
        if len(row.blocks) * size < end:
            raise IllegalPlan(f"{len(row.blocks)} blocks of row {step.row} do not hold {end} tokens")
        for head in range(mine.rank, self._arena.heads, len(mine.members)):
            last = self._at(row, step.start - 1, head) if step.start else 0
            for index in range(step.start, end):
                last = _chain(last, row.tokens[index])
                page, offset = row.blocks[index // size][head], index % size
                if written.setdefault((page, offset), last) != last:
                    raise IllegalPlan(f"two rows of step write page {page} at {offset}")
                self._arena.pages[page][offset] = last

    def _at(self, row: _Row, index: int, head: int) -> int:
        size = self._arena.page_tokens
        return self._arena.pages[row.blocks[index // size][head]][index % size]

    def _read(self, row: _Row, length: int, head: int) -> array[int]:
        """Hashes of the first `length` tokens, through the page table."""
        hashes = array("I")
        for block in row.blocks[: -(-length // self._arena.page_tokens)]:
            hashes.extend(self._arena.pages[block[head]])
        return hashes[:length]


@dataclass(frozen=True)
class Job:
    """Something a device, or all members of a domain together, can execute now."""

    body: Body
    devices: tuple[int, ...]


class FakeCluster:
    """Fake workers of a node with one queue each.

    Proofs and plans are collective: they run when they are at the head of every member's queue, so an order
    that differs between devices shows as a standstill. The caller decides when a job begins and ends, and
    may replace a worker in between.
    """

    def __init__(self, devices: int, arena: FakeArena, vocab: int) -> None:
        self.arena = arena
        self.workers = [FakeWorker(device, arena, vocab) for device in range(devices)]
        self._queues: list[deque[Body]] = [deque() for _ in range(devices)]
        self._busy: list[Job | None] = [None] * devices
        self._vocab = vocab

    @property
    def idle(self) -> bool:
        return not any(self._queues) and not any(self._busy)

    def deliver(self, device: int, body: Body) -> None:
        self._queues[device].append(body)

    def startable(self, aborted: frozenset[int] = frozenset()) -> list[Job]:
        """Jobs that can begin; plans of `aborted` epochs are dropped at dequeue, as workers do."""
        jobs: list[Job] = []
        for device, queue in enumerate(self._queues):
            while queue and isinstance(queue[0], StepPlan | ProveDomain) and queue[0].epoch in aborted:
                queue.popleft()
            if not queue or self._busy[device] is not None:
                continue
            body = queue[0]
            if not isinstance(body, StepPlan | ProveDomain):
                jobs.append(Job(body, (device,)))
                continue
            mine = self.workers[device].domains.get(body.epoch)
            if mine is None:
                raise IllegalPlan(f"device {device} is not in epoch {body.epoch}")
            if mine.rank == 0 and all(self._at_head(member, body) for member in mine.members):
                jobs.append(Job(body, mine.members))
        return jobs

    def begin(self, job: Job) -> None:
        for device in job.devices:
            self._queues[device].popleft()
            self._busy[device] = job

    def finish(self, job: Job, seconds: float) -> list[tuple[int, Body]]:
        """(device, answer) of the job; nothing when a member was replaced meanwhile.

        Pages are written only now, by survivors of a broken step too: the latest that a step can touch them.
        """
        present = [device for device in job.devices if self._busy[device] is job]
        for device in present:
            self._busy[device] = None
            if isinstance(job.body, StepPlan):
                self.workers[device].begin(job.body)
        if len(present) < len(job.devices):
            return []
        answers: list[tuple[int, Body]] = []
        for device in job.devices:
            worker = self.workers[device]
            if isinstance(job.body, StepPlan):
                result = worker.finish(job.body, seconds)
                answers += [(device, result)] if result is not None else []
            else:
                answers += [(device, answer) for answer in worker.handle(job.body)]
        return answers

    def replace(self, device: int) -> FakeWorker:
        """Kill a device's worker: its queue, rows and step are lost; a new one takes its place."""
        old = self.workers[device]
        self.workers[device] = FakeWorker(device, self.arena, self._vocab, old.incarnation + 1)
        self._queues[device].clear()
        self._busy[device] = None
        return self.workers[device]

    def leave(self, device: int, job: Job) -> None:
        """The device gives a collective up in whose wait it is: its domain was revoked."""
        if self._busy[device] is job:
            self._busy[device] = None

    def leave_all(self, device: int) -> None:
        """The device drops its domains and whatever it was told: its engine is gone."""
        self._queues[device].clear()
        self._busy[device] = None
        self.workers[device].domains.clear()

    def _at_head(self, device: int, body: StepPlan | ProveDomain) -> bool:
        if self._busy[device] is not None or not self._queues[device]:
            return False
        head = self._queues[device][0]
        return type(head) is type(body) and head.epoch == body.epoch and head.step == body.step
