"""Many short requests with aborts and refusals: every answer is right, and at the end every page and row is free."""

import random

from draftwood.engine.request import SamplingParams
from draftwood.errors import RequestError
from tests.fakes import Toy, fake_engine, fake_plan


def test_hundreds_of_requests_with_aborts_and_oversized_prompts():
    dice, toy = random.Random(5), Toy()
    engine = fake_engine("blurred", fake_plan(8, num_pages=24, max_num_seqs=5, prefill_chunk=16, max_model_len=128))
    prompts, answers, refused, aborted = {}, {}, 0, set()
    pending = 250
    while pending or not engine.idle:
        while pending and dice.random() < 0.4:
            pending -= 1
            length = 500 if dice.random() < 0.05 else dice.randint(1, 40)
            prompt = [dice.randrange(48) for _ in range(length)]
            limit, budget = dice.randint(1, 12), dice.choice([None, 0, 3, 64])
            try:
                new = engine.add(prompt, SamplingParams(max_tokens=limit, tree_budget=budget))
            except RequestError:
                refused += 1
                continue
            prompts[new], answers[new] = (prompt, limit), []
        if dice.random() < 0.1 and prompts:
            victim = dice.choice(list(prompts))
            if engine.abort(victim) is not None:
                aborted.add(victim)
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    assert engine.scheduler.pool.free_count == engine.plan.num_pages and not engine.usage
    assert refused and aborted
    for i, (prompt, limit) in prompts.items():
        expected = toy.greedy(prompt, limit)
        assert answers[i] == expected[: len(answers[i])]
        assert i in aborted or len(answers[i]) == limit
