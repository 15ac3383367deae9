"""Random traffic under random switches: every stream is what an undisturbed engine gives."""

from __future__ import annotations

import random

import pytest

from dynamictp.messages import ArenaFacts, CancelSwitch, RampSettings
from tests.engine.engine_simulation import HEADS, PAGE, TERMINAL, VOCAB, Simulation, engine_start

LAYOUTS = ("tp1", "tp2", "tp3", "tp1+tp1", "tp2+tp1", "3*tp1", "tp1@2", "tp2@1,0", "tp2@2,1+tp1@0")


class Traffic:
    """Random arrivals, cancels, switches and (optionally) kills on one simulation."""

    def __init__(self, seed: int, *, kills: int = 0) -> None:
        self.rng = rng = random.Random(seed)
        blocks = rng.choice((12, 24, 48, 96))
        start = engine_start(
            arena=ArenaFacts(blocks * HEADS, PAGE, "fp32"),
            layout=rng.choice(LAYOUTS[:6]),
            mode=rng.choice(("static", "dynamic")),
            max_num_seqs=rng.choice((2, 4, 8)),
            max_batched_tokens=rng.choice((8, 24, 64)),
            max_model_len=min(96, blocks * PAGE),
            comm_slots=rng.choice((6, 7, 10)),
            prefix_cache=rng.random() < 0.8,
            max_step_ms=rng.choice((3.0, 100.0)),
            ramp=RampSettings(
                observe_s=rng.choice((0.0, 0.002, 0.01)), settle_s=0.002, min_finished=5, probe_s=5.0
            ),
        )
        self.sim = Simulation(rng, start, latency_s=rng.choice((0.0, 0.0005, 0.004)))
        # The same blocks after different beginnings: only the whole chain tells them apart.
        blocks_of_text = [[rng.randrange(VOCAB) for _ in range(PAGE)] for _ in range(3)]
        self.prefixes = [
            [t for _ in range(rng.randint(1, 6)) for t in rng.choice(blocks_of_text)] for _ in "1234"
        ]
        self.longest = start.max_model_len
        self.switches: list[str] = []
        self.kills = kills

    def play(self, switches: int) -> None:
        sim, rng = self.sim, self.rng
        sim.run(lambda: sim.ready is not None)
        while len(self.switches) < switches:
            self.act()
            for _ in range(rng.choice((1, 4, 16))):
                sim.step()
                if rng.random() < 0.05:
                    sim.core.check_integrity()
        sim.run_until_idle(within_s=120.0)
        sim.turn()
        sim.check_idle()
        outcomes = [sim.statuses[switch].outcome for switch in self.switches]
        assert all(outcome in TERMINAL for outcome in outcomes), outcomes

    def act(self) -> None:
        sim, rng = self.sim, self.rng
        choice = rng.random()
        if choice < 0.55:
            if len(sim.unfinished) < 24:
                self.submit()
        elif choice < 0.65:
            if sim.unfinished:
                sim.cancel(rng.choice(sim.unfinished))
        elif choice < 0.68:
            whole = [s for s in sim.unfinished if not s.cancelled and s.sampling.prompt_logprobs is None]
            if whole:
                sim.resubmit(rng.choice(whole))
        elif choice < 0.70:
            if self.switches:
                sim.core.on_server(CancelSwitch(self.switches[-1]))
        elif choice < 0.74 and self.kills:
            self.kills -= 1
            sim.kill(rng.randrange(3))
        else:
            deadline = rng.choice((0.0, 0.0, 0.01, 0.1))
            ramp = {"ramp": True} if rng.random() < 0.4 else {"forced": rng.random() < 0.2}
            self.switches.append(sim.set_layout(rng.choice(LAYOUTS), drain_deadline_s=deadline, **ramp))

    def submit(self) -> None:
        rng = self.rng
        prompt = list(rng.choice(self.prefixes)) if rng.random() < 0.5 else []
        prompt += [rng.randrange(VOCAB) for _ in range(rng.randint(1, rng.choice((3, 12, 40))))]
        del prompt[self.longest - 2 :]
        fields = {}
        if rng.random() < 0.2:
            fields = {"logprobs": 0, "prompt_logprobs": 0}
        stop_at = rng.randrange(20) if rng.random() < 0.3 else None
        self.sim.submit(
            prompt,
            rng.randint(1, rng.choice((4, 16, 60))),
            seed=rng.randrange(4),
            stop_at=stop_at,
            priority=rng.choice((0, 0, 1)),
            **fields,
        )


@pytest.mark.parametrize("seed", range(40))
def test_streams_equal_the_reference_under_random_switches(seed: int) -> None:
    traffic = Traffic(seed)
    traffic.play(switches=20)
    outcomes = traffic.sim.outcomes
    assert outcomes.count("closed") >= 2, f"seed {seed}: {outcomes}"


@pytest.mark.parametrize("seed", range(100, 116))
def test_streams_survive_killed_workers(seed: int) -> None:
    # Fewer than make a request suspect of being their cause.
    Traffic(seed, kills=2).play(switches=15)
