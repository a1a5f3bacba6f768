"""What every engine must do, whatever computes inside. A tier subclasses EngineConformance and gives its `engine`.

The engine has a vocabulary of 64, sequences of up to 128 tokens, float32. Deployments are dropped after each test.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plexrl_worker.engine import losses, port
from plexrl_worker.engine.errors import (
    Aborted,
    InvalidArgument,
    NonFinite,
    SlotOccupied,
    UnknownDeployment,
    VersionMismatch,
)
from plexrl_worker.engine.port import ALL_COMPONENTS, Component, LossName, LossParams
from plexrl_worker.engine.settings import DeploymentSettings, InitBase
from tests.support.engine_checkpoints import CheckpointConformance
from tests.support.engine_concurrency import ConcurrencyConformance
from tests.support.engine_leaves import LeaveConformance
from tests.support.engine_preloads import PreloadConformance
from tests.support.engine_residency import ResidencyConformance
from tests.support.engine_rollouts import RolloutConformance
from tests.support.engine_subjects import (
    AGREEMENT,
    SAMPLING,
    STEP,
    VOCAB_SIZE,
    ImageMaker,
    Impatient,
    Model,
    Patient,
    batch,
    loss_batch,
    policy_batch,
    random_batch,
)
from tests.support.engine_yields import YieldConformance


class EngineConformance(
    YieldConformance,
    PreloadConformance,
    ConcurrencyConformance,
    LeaveConformance,
    CheckpointConformance,
    RolloutConformance,
    ResidencyConformance,
):
    """The suite. Subclasses define a fixture `engine` and, where images are special, `make_image`."""

    @pytest.fixture
    def make_image(self) -> ImageMaker:
        return lambda size_bytes: np.zeros(size_bytes, np.uint8)

    @pytest.fixture
    def make_model(self, engine: port.Engine, make_image: ImageMaker) -> Iterator[Callable[..., Model]]:
        names: list[str] = []

        def make(
            seed: int | None = 7, *, trainable: bool = True, micro_batch_tokens: int = 64, rollout_only: bool = False
        ) -> Model:
            names.append(f"model-{len(names)}")
            trainable = trainable and not rollout_only
            settings = DeploymentSettings(trainable, micro_batch_tokens, rollout_only=rollout_only)
            layout = engine.declare(names[-1], settings)
            model = Model(engine, names[-1], layout, make_image(layout.host_bytes))
            engine.attach_host(model.name, model.image)
            if seed is not None:
                engine.initialize(model.name, InitBase(seed), 0, Patient())
            return model

        yield make
        for name in names:
            engine.drop(name)

    @pytest.fixture
    def model(self, make_model: Callable[..., Model]) -> Model:
        return make_model()

    # What an engine says.

    def test_describes_itself(self, engine: port.Engine) -> None:
        description = engine.describe()
        assert description.vocab_size == VOCAB_SIZE
        assert description.max_sequence_tokens == 128
        assert set(description.losses) == set(LossName)

    def test_a_new_model_is_on_the_device_and_nowhere_else(self, model: Model) -> None:
        state = model.engine.state(model.name)
        assert state.resident == state.dirty == ALL_COMPONENTS
        assert (state.optimizer_step, state.rollout_version) == (0, 0)

    def test_declaring_again_is_the_same_unless_settings_differ(self, model: Model) -> None:
        settings = DeploymentSettings(micro_batch_tokens=64)
        assert model.engine.declare(model.name, settings) == model.layout
        with pytest.raises(InvalidArgument, match="other settings"):
            model.engine.declare(model.name, replace(settings, trainable=False))

    def test_an_unknown_model_is_refused(self, engine: port.Engine) -> None:
        with pytest.raises(UnknownDeployment):
            engine.state("nobody")
        engine.drop("nobody")

    # Generation.

    def test_sampled_log_probabilities_are_the_trainers(self, model: Model) -> None:
        prompts = random_batch(1)
        generation = model.generate(prompts)
        assert generation.lengths.size == 2 * prompts.lengths.size
        assert generation.token_ids.size == generation.lengths.sum() == generation.logprobs.size
        assert set(generation.finish_reasons) == {port.FinishReason.LENGTH}
        sequences = _completed(prompts, generation, SAMPLING.n)
        scores = np.split(model.score(batch(*sequences)), np.cumsum([len(s) for s in sequences])[:-1])
        tails = [score[-length:] for score, length in zip(scores, generation.lengths, strict=True)]
        assert np.abs(np.concatenate(tails) - generation.logprobs).max() < AGREEMENT

    def test_draws_do_not_depend_on_what_else_is_in_the_batch(self, model: Model) -> None:
        many = random_batch(2, count=9)
        few = batch(*_split(many)[:2])
        whole, part = model.generate(many), model.generate(few)
        count = int(part.token_ids.size)
        assert part.token_ids.tolist() == whole.token_ids[:count].tolist()
        single = model.generate(few, replace(SAMPLING, n=1))
        firsts = [ids for index, ids in enumerate(_completions(part)) if index % SAMPLING.n == 0]
        assert _completions(single) == firsts

    def test_seeds_decide(self, model: Model) -> None:
        prompts = random_batch(3)
        first, again = model.generate(prompts), model.generate(prompts)
        other = model.generate(prompts, replace(SAMPLING, seed=12))
        assert first.token_ids.tolist() == again.token_ids.tolist()
        assert first.token_ids.tolist() != other.token_ids.tolist()

    def test_greedy_completions_of_a_prompt_are_alike(self, model: Model) -> None:
        completions = _completions(model.generate(random_batch(4), replace(SAMPLING, temperature=0.0)))
        assert completions[0::2] == completions[1::2]

    def test_a_stop_token_ends_a_completion_and_belongs_to_it(self, model: Model) -> None:
        prompts = random_batch(5)
        free = model.generate(prompts, replace(SAMPLING, n=4))
        stop = int(free.token_ids[1])
        stopped = model.generate(prompts, replace(SAMPLING, n=4, stop_token_ids=(stop,)))
        for before, after, reason in zip(
            _completions(free), _completions(stopped), stopped.finish_reasons, strict=True
        ):
            if stop in before:
                assert after == before[: before.index(stop) + 1]
            else:
                assert after == before
            assert (reason is port.FinishReason.STOP) == (stop in before)
        assert port.FinishReason.STOP in stopped.finish_reasons

    def test_without_log_probabilities_none_come(self, model: Model) -> None:
        assert model.generate(random_batch(6), replace(SAMPLING, logprobs=False)).logprobs.size == 0

    def test_top_k_of_one_is_greedy(self, model: Model) -> None:
        prompts = random_batch(7)
        greedy = model.generate(prompts, replace(SAMPLING, temperature=0.0))
        assert model.generate(prompts, replace(SAMPLING, top_k=1)).token_ids.tolist() == greedy.token_ids.tolist()

    def test_another_version_is_refused(self, model: Model) -> None:
        """G06."""
        model.version = 3
        with pytest.raises(VersionMismatch, match="version 3"):
            model.generate(random_batch(8))

    @pytest.mark.parametrize(
        "change",
        [
            {"n": 0},
            {"max_tokens": 0},
            {"max_tokens": 128},
            {"temperature": -1.0},
            {"temperature": 0.001},
            {"top_p": 1.5},
            {"stop": ("x",)},
        ],
    )
    def test_settings_that_cannot_be_honoured_are_refused(self, model: Model, change: dict[str, object]) -> None:
        with pytest.raises(InvalidArgument):
            model.generate(random_batch(9), replace(SAMPLING, **change))  # type: ignore[arg-type]

    def test_token_ids_outside_the_vocabulary_are_refused(self, model: Model) -> None:
        with pytest.raises(InvalidArgument, match=r"\[0, 64\)"):
            model.generate(batch([1, VOCAB_SIZE]))
        with pytest.raises(InvalidArgument, match=r"\[0, 64\)"):
            model.score(batch([1, -1]))

    def test_an_aborted_generate_leaves_the_engine_ready(self, model: Model) -> None:
        prompts = random_batch(10)
        before = model.generate(prompts)
        with pytest.raises(Aborted):
            model.engine.generate(model.name, 0, prompts, SAMPLING, Impatient())
        assert model.generate(prompts).token_ids.tolist() == before.token_ids.tolist()

    def test_generate_reports_progress(self, model: Model) -> None:
        # A child keeps silent about what is over in a moment: the work doubles until it is not.
        prompts, n, heard = random_batch(11), 2, set[int]()
        while not heard and n < 512:
            n, control = 2 * n, Patient()
            model.engine.generate(model.name, 0, prompts, replace(SAMPLING, n=n), control)
            heard = {total for _, total in control.heard}
        assert heard == {prompts.lengths.size * n}

    # Versions.

    def test_trainer_and_generator_agree_only_after_a_sync(self, model: Model) -> None:
        """G06."""
        tokens = random_batch(12)
        model.train(loss_batch(12))
        model.step()
        trained = model.score(tokens)
        assert np.abs(trained - model.score_rollout(tokens)).max() > 10 * AGREEMENT
        model.sync()
        assert np.abs(trained - model.score_rollout(tokens)).max() < AGREEMENT
        assert model.engine.state(model.name).rollout_version == 1

    def test_cached_prefixes_of_older_weights_are_never_used(self, model: Model) -> None:
        """G07."""
        prompts = batch(*(np.random.default_rng(s).integers(2, VOCAB_SIZE, 100).tolist() for s in range(3)))
        for seed in range(3):
            model.generate(prompts)
            model.train(loss_batch(seed))
            model.step()
            model.sync()
            generation = model.generate(prompts)
            scores = model.score(batch(*_completed(prompts, generation, SAMPLING.n)))
            expected = scores.reshape(-1, 100 + SAMPLING.max_tokens)[:, 100:].ravel()
            assert np.abs(expected - generation.logprobs).max() < AGREEMENT

    def test_the_generator_holds_one_model_at_a_time(self, make_model: Callable[..., Model]) -> None:
        first, second = make_model(1), make_model(None)
        with pytest.raises(SlotOccupied, match=first.name):
            second.engine.initialize(second.name, InitBase(7), 0, Patient())
        first.swap_out()
        second.engine.initialize(second.name, InitBase(7), 0, Patient())
        with pytest.raises(SlotOccupied, match=second.name):
            first.swap_in()

    # Training.

    @pytest.mark.parametrize("loss", [LossName.IMPORTANCE_SAMPLING, LossName.PPO, LossName.GRPO, LossName.CISPO])
    def test_linear_reproduces_any_loss(self, make_model: Callable[..., Model], loss: LossName, tmp_path: Path) -> None:
        model = make_model()
        given = policy_batch(model, 20)
        params = LossParams(kl_coef=0.3 if loss is LossName.GRPO else None)
        if loss is not LossName.GRPO:
            given = replace(given, ref_logprobs=None)
        metrics = model.train(given, loss, params)
        direct = model.gradients(tmp_path / "direct")
        positions = np.flatnonzero(given.weights)
        terms = losses.evaluate(loss, params, metrics.logprobs[positions], losses.select(given, positions))
        assert metrics.loss == pytest.approx(terms.loss)
        slopes = np.zeros_like(given.weights)
        slopes[positions] = terms.gradient / given.weights[positions]
        model.engine.initialize(model.name, InitBase(7), 0, Patient())
        model.train(port.LossBatch(given.tokens, given.weights, logprob_grads=slopes), LossName.LINEAR)
        np.testing.assert_allclose(model.gradients(tmp_path / "linear"), direct, rtol=1e-4, atol=1e-6)

    def test_gradients_accumulate_linearly(self, model: Model, tmp_path: Path) -> None:
        whole = loss_batch(21)
        model.train(whole)
        expected = model.gradients(tmp_path / "whole")
        model.engine.initialize(model.name, InitBase(7), 0, Patient())
        for share in (0.25, 0.75):
            model.train(replace(whole, weights=(whole.weights * share).astype(np.float32)))
        np.testing.assert_allclose(model.gradients(tmp_path / "parts"), expected, rtol=1e-3, atol=1e-6)

    def test_a_step_lowers_the_loss_it_was_made_of(self, model: Model) -> None:
        given = loss_batch(22)
        before = model.train(given)
        model.engine.optim_step(model.name, port.AdamWParams(lr=1e-5))
        after = model.train(given)
        assert before.loss == pytest.approx(-float(np.sum(given.weights * before.logprobs)), rel=1e-5)
        assert after.loss < before.loss

    def test_metrics(self, model: Model) -> None:
        given = policy_batch(model, 23)
        metrics = model.train(given, LossName.GRPO, LossParams(kl_coef=0.1))
        used = given.weights != 0
        assert given.old_logprobs is not None
        log_ratio = (metrics.logprobs - given.old_logprobs)[used].astype(np.float64)
        assert metrics.token_count == used.sum()
        assert metrics.kl == pytest.approx(np.mean(np.exp(log_ratio) - 1 - log_ratio), rel=1e-4)
        assert 0 < metrics.entropy <= np.log(VOCAB_SIZE) + 1e-6
        assert 0 < metrics.clip_fraction < 1
        assert (metrics.logprobs[~used] == 0).all()
        np.testing.assert_allclose(metrics.logprobs[used], model.score(given.tokens)[used], atol=1e-5)

    def test_training_learns(self, model: Model) -> None:
        given = loss_batch(24)
        first = last = model.train(given).loss
        for _ in range(60):
            model.engine.optim_step(model.name, replace(STEP, lr=1e-2))
            last = model.train(given).loss
        assert last < 0.9 * first

    def test_a_failed_forward_backward_leaves_the_gradients_alone(
        self, make_model: Callable[..., Model], tmp_path: Path
    ) -> None:
        model = make_model(micro_batch_tokens=16)
        given = replace(policy_batch(model, 25), ref_logprobs=None)
        assert given.old_logprobs is not None
        poisoned = given.old_logprobs.copy()
        shortest = int(np.argmin(given.tokens.lengths))
        poisoned[losses.first_positions(given.tokens)[shortest] + 1] = -3e4
        for round_number in range(2):
            before = model.gradients(tmp_path / f"before-{round_number}")
            with pytest.raises(NonFinite):
                model.train(replace(given, old_logprobs=poisoned), LossName.PPO)
            control = Impatient(patience=1)
            with pytest.raises(Aborted):
                model.engine.forward_backward(model.name, given, LossName.PPO, LossParams(), control)
            np.testing.assert_array_equal(model.gradients(tmp_path / f"after-{round_number}"), before)
            model.train(given, LossName.PPO)

    @pytest.mark.parametrize(
        ("loss", "params", "change", "says"),
        [
            (LossName.CROSS_ENTROPY, LossParams(clip_low=0.2), {}, "clip_low"),
            (LossName.CROSS_ENTROPY, LossParams(), {"advantages": 0}, "advantages"),
            (LossName.PPO, LossParams(), {}, "needs"),
            (LossName.PPO, LossParams(kl_coef=0.1), {"advantages": 0, "old_logprobs": 0}, "kl_coef"),
            (LossName.GRPO, LossParams(kl_coef=0.1), {"advantages": 0, "old_logprobs": 0}, "ref_logprobs"),
            (LossName.LINEAR, LossParams(), {}, "logprob_grads"),
            (LossName.CROSS_ENTROPY, LossParams(), {"weights": 1}, "first token"),
            (LossName.CROSS_ENTROPY, LossParams(), {"weights": np.nan}, "finite"),
        ],
    )
    def test_a_loss_takes_exactly_what_it_uses(
        self, model: Model, loss: LossName, params: LossParams, change: dict[str, float], says: str
    ) -> None:
        plain = loss_batch(26)
        arrays = {name: np.full(plain.weights.size, value, np.float32) for name, value in change.items()}
        with pytest.raises(InvalidArgument, match=says):
            model.train(replace(plain, **arrays), loss, params)  # type: ignore[arg-type]

    def test_optimizer_settings_out_of_range_are_refused(self, model: Model) -> None:
        model.train(loss_batch(27))
        for wrong in ({"lr": 0.0}, {"beta1": 1.0}, {"eps": 0.0}, {"weight_decay": -1.0}, {"max_grad_norm": 0.0}):
            with pytest.raises(InvalidArgument):
                model.engine.optim_step(model.name, replace(STEP, **wrong))
        assert model.engine.state(model.name).optimizer_step == 0

    def test_clipping_bounds_the_gradient_but_reports_its_norm(self, make_model: Callable[..., Model]) -> None:
        model = make_model()
        model.train(loss_batch(28))
        free = model.engine.optim_step(model.name, replace(STEP, max_grad_norm=None))
        model.engine.initialize(model.name, InitBase(7), 0, Patient())
        model.train(loss_batch(28))
        clipped = model.engine.optim_step(model.name, replace(STEP, max_grad_norm=1e-3))
        assert clipped.grad_norm == pytest.approx(free.grad_norm, rel=1e-5)
        assert (free.step, clipped.step) == (1, 1)

    def test_a_reference_scores_and_samples_but_is_not_trained(self, make_model: Callable[..., Model]) -> None:
        reference = make_model(trainable=False)
        policy = {Component.GRADIENTS, Component.OPTIMIZER}
        assert not policy & {entry.component for entry in reference.layout.components}
        tokens = random_batch(29)
        assert np.abs(reference.score(tokens) - reference.score_rollout(tokens)).max() < AGREEMENT
        with pytest.raises(InvalidArgument, match="reference"):
            reference.train(loss_batch(29))
        with pytest.raises(InvalidArgument, match="reference"):
            reference.step()


def _split(tokens: port.TokenBatch) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens.token_ids, np.cumsum(tokens.lengths)[:-1])]


def _completions(generation: port.Generation) -> list[list[int]]:
    return [part.tolist() for part in np.split(generation.token_ids, np.cumsum(generation.lengths)[:-1])]


def _completed(prompts: port.TokenBatch, generation: port.Generation, n: int) -> list[list[int]]:
    """Prompts with their completions."""
    starts = [prompt for prompt in _split(prompts) for _ in range(n)]
    return [start + completion for start, completion in zip(starts, _completions(generation), strict=True)]
