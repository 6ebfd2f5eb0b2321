"""What the sampler promises, on a dense toy: stops, turns, pauses, waves, noise, filters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lab import Lab, prompts

from orbit_jax.model.stream import Stream
from orbit_jax.rl import admission, draw, sampler
from orbit_jax.rl.admission import admit_prompts
from orbit_jax.rl.packing import pack
from orbit_jax.rl.rollouts import Rollouts
from orbit_jax.rl.sampler import EOS, IDLE, LENGTH, RUNNING, TOOL, Incoming, SamplerState

STOPS = (0, 9, 17, 30)  # 0 is also what padding holds
BUCKET = Lab.rows * Lab.slots // 4  # of incoming tokens: the one that all calls here fall into


@pytest.fixture(scope="module")
def adapter(toy: Lab):
    return toy.adapter()


@pytest.fixture(scope="module")
def stopping(toy: Lab, adapter) -> Rollouts:
    """Rollouts of which some stop by one of four ids and some by length."""
    return toy.generate(adapter, stop_ids=STOPS)


def admit(toy: Lab, state: SamplerState, asked: list, noise: list, **given) -> Incoming:
    """Prompts into the first slots, each a group of its own unless told otherwise."""
    settings = {
        "groups": range(len(asked)),
        "max_completion_tokens": 40,
        "stop_ids": (),
        "temperature": 1.0,
    } | given
    return admit_prompts(toy.model, state, asked, noise, **settings)


def nothing(state: SamplerState) -> Incoming:
    """No new tokens: the call only goes on."""
    rows, slots = state.tokens.shape
    empty = pack([], rows, 1, BUCKET)
    none = np.zeros(rows, bool)
    return Incoming(
        stream=Stream(empty.tokens, empty.rows, empty.positions, rows, slots),
        update=none,
        fresh=none,
        source=np.arange(rows, dtype=np.int32),
        tokens=np.zeros((rows, slots), np.int32),
        lengths=np.ones(rows, np.int32),
        controls=jax.device_get(state.controls),
    )


def append(state: SamplerState, given: dict[int, list[int]], room: int) -> Incoming:
    """A later turn: tokens behind what slots hold, and room for so many more."""
    incoming = nothing(state)
    tokens, lengths = np.array(state.tokens), np.array(state.lengths)
    pieces = []
    for slot, ids in given.items():
        end = lengths[slot] + len(ids)
        tokens[slot, lengths[slot] : end] = ids
        # The last token drawn has not been processed yet; the last one given is decoded from.
        pieces.append((slot, lengths[slot] - 1, tokens[slot, lengths[slot] - 1 : end - 1]))
        lengths[slot] = end
    part = pack(pieces, *state.tokens.shape[:1], 1, BUCKET)
    update = np.isin(np.arange(len(lengths)), list(given))
    return incoming.replace(
        stream=Stream(part.tokens, part.rows, part.positions, *state.tokens.shape),
        update=update,
        tokens=tokens,
        lengths=lengths,
        controls=incoming.controls.replace(limits=np.where(update, lengths + room, 0)),
    )


def same_rollouts(a: Rollouts, b: Rollouts, rows_of_a=slice(None)) -> bool:
    """Whether completions, log-probs and stop reasons have the same bits."""
    rows = range(len(a.lengths))[rows_of_a]
    return len(rows) == len(b.lengths) and all(
        a.status[i] == b.status[j]
        and a.completion(i) == b.completion(j)
        and np.array_equal(a.logprobs[i, a.sampled[i]], b.logprobs[j, b.sampled[j]])
        for j, i in enumerate(rows)
    )


# T7: stops


def test_a_row_ends_at_its_first_stop_id_or_at_its_limit_and_says_which(stopping):
    last = [stopping.completion(i)[-1] for i in range(len(stopping.lengths))]
    for i, status in enumerate(stopping.status):
        completion = stopping.completion(i)
        assert not set(completion[:-1]) & set(STOPS)
        assert (status == EOS) == (last[i] in STOPS)
        assert status in (EOS, LENGTH)
        assert len(completion) == 40 or status == EOS
    # The run shows all cases: stops by several ids, among them the padding's, and by length.
    assert {0} < {t for t in last if t in STOPS}
    assert LENGTH in stopping.status


def test_the_stop_id_itself_was_sampled_and_nothing_behind_it(stopping):
    for i, length in enumerate(stopping.lengths):
        first = stopping.prompt_lengths[i]
        assert not stopping.sampled[i, :first].any()
        assert stopping.sampled[i, first:length].all()
        assert not stopping.sampled[i, length:].any()
        assert (stopping.logprobs[i, first:length] < 0).all()
        assert (stopping.logprobs[i, length:] == 0).all()


def test_a_stop_id_at_the_limit_counts_as_eos(toy, adapter, stopping):
    first = stopping.completion(0)[0]
    short = toy.generate(adapter, stop_ids=(first,), max_completion_tokens=1)
    assert short.completion(0) == [first]
    drawn = np.array([short.completion(i)[0] for i in range(Lab.rows)])
    assert (short.status == np.where(drawn == first, EOS, LENGTH)).all()
    assert LENGTH in short.status


def test_stop_ids_stand_for_the_reasons_that_the_host_gives(toy, adapter):
    state = toy.empty()
    incoming = admit(toy, state, prompts(24), noise_ids(24), stop_ids=STOPS)
    reasons = np.tile(np.int32([EOS, TOOL, EOS, TOOL]), (Lab.rows, 1))
    incoming = incoming.replace(controls=incoming.controls.replace(stop_reasons=reasons))
    state = jax.device_get(toy.advance(adapter, state, incoming, 40))
    last = state.tokens[range(Lab.rows), state.lengths - 1]
    expected = np.select([np.isin(last, (9, 30)), np.isin(last, (0, 17))], [TOOL, EOS], LENGTH)
    assert state.status.tolist() == expected.tolist()
    assert set(state.status) == {EOS, LENGTH, TOOL}


def test_a_row_without_room_stops_before_it_starts(toy, adapter):
    state = toy.empty()
    incoming = admit(toy, state, prompts(24), noise_ids(24), max_completion_tokens=0)
    state = jax.device_get(toy.advance(adapter, state, incoming, 40))
    assert (state.status == LENGTH).all()
    assert not state.sampled.any()


# T9: noise


def noise_ids(count: int) -> list[tuple[int, int, int, int]]:
    return [(0, 0, i, 0) for i in range(count)]


def test_samples_of_a_group_differ(stopping):
    for group in range(6):
        rows = np.flatnonzero(stopping.groups == group)
        assert len({tuple(stopping.completion(i)) for i in rows}) == len(rows) == 4


@pytest.mark.parametrize("which", ["seed", "step", "prompt_ids"])
def test_every_key_of_the_noise_changes_the_samples(toy, adapter, stopping, which):
    change = {"seed": 1, "step": 1, "prompt_ids": range(6, 12)}[which]
    other = toy.generate(adapter, stop_ids=STOPS, **{which: change})
    pairs = [(stopping.completion(i), other.completion(i)) for i in range(Lab.rows)]
    assert all(a[:5] != b[:5] for a, b in pairs if len(a) > 5)


def test_the_same_keys_give_the_same_bits(toy, adapter, stopping):
    assert same_rollouts(toy.generate(adapter, stop_ids=STOPS), stopping)


def test_a_prompt_alone_gives_what_it_gives_in_any_batch(toy, adapter):
    asked = prompts(6, 20, 24)
    together = toy.generate(adapter, prompts=asked)
    alone = toy.generate(adapter, 8, prompts=[asked[4]], prompt_ids=[4])
    assert same_rollouts(together, alone, slice(16, 20))


def test_a_prompt_gives_the_same_in_any_slot(toy, adapter, stopping):
    order = [3, 5, 0, 2, 1, 4]
    moved = toy.generate(
        adapter, prompts=[prompts()[i] for i in order], prompt_ids=order, stop_ids=STOPS
    )
    for place, group in enumerate(order):
        rows = slice(4 * place, 4 * place + 4)
        expected = [stopping.completion(i) for i in range(4 * group, 4 * group + 4)]
        assert [moved.completion(i) for i in range(Lab.rows)[rows]] == expected
        np.testing.assert_array_equal(
            moved.logprobs[rows], stopping.logprobs[4 * group : 4 * group + 4]
        )


def test_waves_through_few_slots_equal_one_big_wave(toy, adapter):
    """8 slots cut groups of 3 in two; each part processes the prompt again."""
    asked = {"prompts": prompts(8), "group_size": 3}
    assert same_rollouts(toy.generate(adapter, **asked), toy.generate(adapter, 8, **asked))


def test_long_prompts_come_in_one_after_another(toy, adapter, stopping, monkeypatch):
    """At most 100 tokens at a time: the smallest stream, of 48, holds one or two prompts."""
    streams, sample = [], toy.sample

    def watched(*args, **given):
        streams.append(args[4].stream.tokens.size)
        return sample(*args, **given)

    monkeypatch.setattr(toy, "sample", watched)
    monkeypatch.setattr(admission, "PREFILL_TOKENS", 100)
    one_by_one = toy.generate(adapter, stop_ids=STOPS)
    assert stopping.calls == 1 < one_by_one.calls
    assert set(streams) == {48}
    assert one_by_one.decode_steps == stopping.decode_steps
    assert same_rollouts(one_by_one, stopping)


def test_a_shared_prompt_equals_one_that_each_row_processes(toy, adapter):
    asked = [p for p in prompts() for _ in range(4)]
    noise = [(0, 0, i // 4, i % 4) for i in range(24)]
    states = []
    for groups in ([i // 4 for i in range(24)], range(24)):
        state = toy.empty()
        incoming = admit(toy, state, asked, noise, groups=groups)
        states.append(jax.device_get(toy.advance(adapter, state, incoming, 40)))
    jax.tree.map(np.testing.assert_array_equal, *states)


# T3: turns and pauses


@pytest.fixture(scope="module")
def turns(toy: Lab, adapter) -> tuple[SamplerState, SamplerState, dict[int, list[int]]]:
    """Slots after a first turn of 10 tokens, after tool output and 12 more in three of them."""
    state = toy.empty()
    incoming = admit(toy, state, prompts(24), noise_ids(24), max_completion_tokens=10)
    first = jax.device_get(state := toy.advance(adapter, state, incoming, 10))
    tool = {3: [50], 7: [51, 52, 53, 54], 20: list(range(40, 49))}
    second = toy.advance(adapter, state, append(first, tool, room=12), 40)
    return first, jax.device_get(second), tool


def test_a_later_turn_equals_processing_everything_from_scratch(toy, adapter, turns):
    """Ids, log-probs and cache behind tool output are those of one long prompt."""
    first, second, tool = turns
    assert (first.status == LENGTH).all()
    texts = [first.tokens[r, : first.lengths[r]].tolist() + ids for r, ids in tool.items()]
    state = toy.empty()
    noise = [noise_ids(24)[r] for r in tool]
    incoming = admit(toy, state, texts, noise, max_completion_tokens=12)
    scratch = jax.device_get(toy.advance(adapter, state, incoming, 40))
    for i, row in enumerate(tool):
        start, end = len(texts[i]), second.lengths[row]
        assert end - start == 12
        assert second.tokens[row, :start].tolist() == texts[i]
        assert second.tokens[row, :end].tolist() == scratch.tokens[i, :end].tolist()
        np.testing.assert_array_equal(
            second.logprobs[row, start:end], scratch.logprobs[i, start:end]
        )
        for kind in ("keys", "values"):
            ours, theirs = getattr(second.cache, kind), getattr(scratch.cache, kind)
            np.testing.assert_array_equal(ours[:, row, :, : end - 1], theirs[:, i, :, : end - 1])


def test_a_later_turn_keeps_the_record_and_knows_whose_tokens_are_whose(turns):
    first, second, tool = turns
    for row, ids in tool.items():
        before, end = first.lengths[row], second.lengths[row]
        drawn_here = [False] * (before - 10) + [True] * 10 + [False] * len(ids) + [True] * 12
        assert second.sampled[row, :end].tolist() == drawn_here
        np.testing.assert_array_equal(second.logprobs[row, :before], first.logprobs[row, :before])
        assert (second.logprobs[row, before : before + len(ids)] == 0).all()


def test_a_later_turn_leaves_the_other_slots_alone(turns):
    first, second, tool = turns
    others = [r for r in range(24) if r not in tool]
    for field in ("tokens", "lengths", "sampled", "logprobs", "status"):
        old, new = getattr(first, field), getattr(second, field)
        np.testing.assert_array_equal(new[others], old[others])


def test_the_trainer_agrees_on_all_turns_exactly(toy, adapter, turns):
    _, state, _ = turns
    rows, positions = np.indices(state.tokens.shape, np.int32)
    known = positions < state.lengths[:, None]
    flat = (x.reshape(-1) for x in (state.tokens, np.where(known, rows, Lab.rows), positions))
    ours = toy.logprobs(adapter, Stream(*flat, *state.tokens.shape)).reshape(state.tokens.shape)
    np.testing.assert_array_equal(ours[state.sampled], state.logprobs[state.sampled])
    assert state.sampled.sum() == 24 * 10 + 3 * 12


def test_pausing_and_going_on_gives_the_bits_of_one_call(toy, adapter):
    state = toy.empty()
    incoming = admit(toy, state, prompts(24), noise_ids(24), stop_ids=STOPS)
    whole = jax.device_get(toy.advance(adapter, state, incoming, 40))
    traces = toy.sample.traces
    state = toy.empty()
    state = toy.advance(adapter, state, incoming, 7)
    paused = jax.device_get(state)
    running = paused.status == RUNNING
    assert running.any()
    assert (paused.sampled.sum(axis=1)[running] == 7).all()
    for _ in range(3):
        state = toy.advance(adapter, state, nothing(paused), 11)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), whole)
    assert toy.sample.traces == traces


def test_finished_slots_are_refilled_while_others_go_on(toy, adapter):
    """Every row has the bits that it has when nothing happens beside it."""
    old, new = prompts(24), prompts(24, seed=1)
    noise = [(0, 1, i, 0) for i in range(24)]
    runs = []
    for asked, ids in ((old, noise_ids(24)), (new, noise)):
        state = toy.empty()
        incoming = admit(toy, state, asked, ids, stop_ids=STOPS)
        runs.append(jax.device_get(toy.advance(adapter, state, incoming, 40)))
    state = toy.empty()
    first = admit(toy, state, old, noise_ids(24), stop_ids=STOPS)
    state = toy.advance(adapter, state, first, 15)
    done = np.asarray(state.status) != RUNNING
    assert 0 < done.sum() < 24
    refill = admit(toy, state, new, noise, stop_ids=STOPS)
    rows = np.where(np.append(done, False)[refill.stream.rows], refill.stream.rows, 24)
    refill = refill.replace(stream=refill.stream.replace(rows=rows), update=done, fresh=done)
    state = jax.device_get(toy.advance(adapter, state, refill, 40))
    for field in ("tokens", "lengths", "sampled", "logprobs", "status"):
        before, after = (getattr(run, field) for run in runs)
        expected = np.where(done.reshape(-1, *[1] * (before.ndim - 1)), after, before)
        np.testing.assert_array_equal(getattr(state, field), expected)


def test_decoding_stops_when_all_rows_have(toy, adapter, monkeypatch):
    drawn = []
    real = sampler.draw

    def counting(*args):
        jax.debug.callback(lambda: drawn.append(1))
        return real(*args)

    monkeypatch.setattr(sampler, "draw", counting)
    sample = functools.partial(toy.jit(sampler.sample, "config"), toy.model, toy.base)
    state = toy.empty(8)
    incoming = admit(toy, state, prompts(5), noise_ids(5), max_completion_tokens=6)
    state = sample(adapter, state, incoming, np.int32(40))
    assert (state.status == np.where(np.arange(8) < 5, LENGTH, IDLE)).all()
    jax.effects_barrier()
    assert len(drawn) == 6
    idle = jax.device_get(state)
    incoming = jax.tree.map(np.asarray, incoming).replace(update=np.zeros(8, bool))
    state = sample(adapter, state, incoming, np.int32(40))
    jax.effects_barrier()
    assert len(drawn) == 6
    np.testing.assert_array_equal(state.tokens, idle.tokens)


@pytest.fixture(scope="module")
def thinned(toy: Lab, adapter) -> Rollouts:
    """Rows that end one after another, in an order that is not that of the slots."""
    limits = [1 + (7 * row + 5) % Lab.rows for row in range(Lab.rows)]
    out = toy.generate(adapter, stop_ids=(), max_completion_tokens=limits)
    assert out.completion_lengths.tolist() == limits
    return out


def test_a_row_has_the_bits_that_it_has_while_all_run(toy, adapter, thinned):
    whole = toy.generate(adapter, stop_ids=())
    for row, length in enumerate(thinned.completion_lengths):
        assert thinned.completion(row) == whole.completion(row)[:length]
        drawn = thinned.sampled[row]
        np.testing.assert_array_equal(thinned.logprobs[row, drawn], whole.logprobs[row, drawn])


def test_only_as_many_rows_are_decoded_as_still_run(toy, adapter, monkeypatch):
    decoded = []
    real = sampler.draw

    def counting(tile, filters, base, hidden, *rest):
        jax.debug.callback(lambda: decoded.append(len(hidden)))
        return real(tile, filters, base, hidden, *rest)

    monkeypatch.setattr(sampler, "draw", counting)
    sample = functools.partial(toy.jit(sampler.sample, "config"), toy.model, toy.base)
    limits = [1] * 6 + [2] * 6 + [3] * 4 + [4] * 6 + [5] * 2
    state = toy.empty()
    incoming = admit(toy, state, prompts(24), noise_ids(24), max_completion_tokens=limits)
    state = sample(adapter, state, incoming, np.int32(40))
    jax.effects_barrier()
    # 24, 18, 12, 8 and 2 rows run; 8 is the fewest that is compiled.
    assert sorted(decoded, reverse=True) == [24, 24, 12, 8, 8]


def test_rows_that_run_are_taken_from_each_shard_and_put_back():
    active = jnp.array([0, 1, 0, 1, 1, 0, 0, 1], bool)
    take, back = sampler._running_first(active, shards=2, rows=2)
    taken = take(jnp.arange(8) * 10)
    assert taken.tolist() == [10, 30, 40, 70]
    assert back(taken)[active].tolist() == [10, 30, 40, 70]


def test_the_memory_of_the_slots_is_used_again(toy, adapter):
    state = toy.empty()
    before = state.cache.keys.unsafe_buffer_pointer()
    incoming = admit(toy, state, prompts(24), noise_ids(24))
    after = toy.advance(adapter, state, incoming, 1)
    assert state.cache.keys.is_deleted()
    assert after.cache.keys.unsafe_buffer_pointer() == before


# Prompts


@pytest.mark.parametrize("length", [1, Lab.slots - 1])
def test_the_shortest_and_the_longest_prompt_are_taken(toy, adapter, length):
    asked = [prompts()[0], [5] * length, *prompts(4)]
    sampled = toy.generate(adapter, prompts=asked, stop_ids=())
    assert (sampled.lengths[4:8] == min(length + 40, Lab.slots)).all()
    assert (sampled.status[4:8] == LENGTH).all()


@pytest.mark.parametrize("length", [0, Lab.slots, 100])
def test_a_prompt_that_leaves_no_room_is_one_clear_error(toy, adapter, length):
    asked = [prompts()[0], [5] * length]
    reason = f"prompt 1 has {length} tokens: a row holds 1 to 63 prompt tokens"
    with pytest.raises(ValueError, match=reason):
        toy.generate(adapter, prompts=asked)


def test_more_stop_ids_than_the_slots_have_room_for_are_one_clear_error(toy, adapter):
    room = toy.empty().controls.stop_ids.shape[1]
    with pytest.raises(ValueError, match=f"tool_ids have {room + 1} ids: .* for {room}"):
        toy.generate(adapter, stop_ids=range(room + 1))


# T2: filters and greedy, for evaluation


@pytest.fixture(scope="module")
def tempered(toy: Lab, adapter):
    """Logits of the whole vocabulary [B, S, V], each standing at the token that it is for."""

    def of(sampled: Rollouts) -> np.ndarray:
        rows, positions = np.indices(sampled.tokens.shape, np.int32)
        rows = np.where(positions < sampled.lengths[:, None], rows, Lab.rows)
        flat = (x.reshape(-1) for x in (sampled.tokens, rows, positions))
        out, _ = toy.words(toy.model, toy.base, adapter, Stream(*flat, *sampled.tokens.shape))
        out = np.asarray(out, np.float64)
        return np.roll(out.reshape(*sampled.tokens.shape, -1), 1, axis=1)

    return of


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def drawn(sampled: Rollouts, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each drawn token: its log-prob by `whole[B, S, V]`, and how many words are likelier."""
    places = np.nonzero(sampled.sampled)
    at = whole[places]
    own = at[np.arange(len(at)), sampled.tokens[places]]
    return own, (at > own[:, None]).sum(axis=1)


def test_top_k_draws_from_the_k_likeliest_and_reports_the_whole_distribution(
    toy, adapter, tempered
):
    sampled = toy.generate(adapter, top_k=2, temperature=0.8)
    assert sampled.filtered
    own, rank = drawn(sampled, log_softmax(tempered(sampled) / 0.8))
    assert set(rank) == {0, 1}
    np.testing.assert_allclose(sampled.logprobs[sampled.sampled], own, atol=1e-5)


def test_top_p_draws_from_the_nucleus(toy, adapter, tempered):
    sampled = toy.generate(adapter, top_p=0.5)
    assert sampled.filtered
    whole = log_softmax(tempered(sampled))
    own, rank = drawn(sampled, whole)
    ranked = np.sort(np.exp(whole[sampled.sampled]), axis=-1)[:, ::-1]
    likelier = np.array([p[:r].sum() for p, r in zip(ranked, rank, strict=True)])
    assert likelier.max() < 0.5 + 1e-5
    assert rank.max() > 1
    np.testing.assert_allclose(sampled.logprobs[sampled.sampled], own, atol=1e-5)


def test_greedy_takes_the_likeliest_and_reports_temperature_one(toy, adapter, tempered):
    sampled = toy.generate(adapter, temperature=0.0)
    own, rank = drawn(sampled, log_softmax(tempered(sampled)))
    assert (rank == 0).all()
    np.testing.assert_allclose(sampled.logprobs[sampled.sampled], own, atol=1e-5)
    for group in range(6):
        rows = np.flatnonzero(sampled.groups == group)
        assert len({tuple(sampled.completion(i)) for i in rows}) == 1


kept_by = jax.jit(draw._kept)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [1, 1, 1]),
        (2, 1.0, [1, 1, 0]),
        (1, 1.0, [1, 0, 0]),
        (3, 1.0, [1, 1, 1]),
        (99, 1.0, [1, 1, 1]),  # more than there are words
        (0, 0.7, [1, 1, 0]),  # probabilities are 0.665, 0.245, 0.090
        (0, 0.6, [1, 0, 0]),
        (0, 0.0, [1, 0, 0]),  # one word is always left
        (2, 0.72, [1, 0, 0]),  # top-p counts what top-k left: 0.731, 0.269
        (2, 0.74, [1, 1, 0]),
    ],
)
def test_filters_keep_what_their_names_say(top_k, top_p, kept):
    scores = jnp.array([[2.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
    found = kept_by(scores, jnp.full(2, top_k), jnp.full(2, top_p, jnp.float32))
    assert found.astype(int).tolist() == [kept, np.roll(kept, 1).tolist()]
