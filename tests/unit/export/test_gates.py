"""Limits go by size or by what the user says, and a figure is held against them."""

import math
from dataclasses import replace

import pytest

from swiftfp8.config.compose import compose_config
from swiftfp8.config.schema import ExportConfig
from swiftfp8.export.fidelity import Fidelity
from swiftfp8.export.gates import judge_fidelity, judge_loss, limits_for
from swiftfp8.export.judge import TaskLoss


def fidelity(ratio: float = 1.0, kl: float = 0.0, top1: float = 1.0) -> Fidelity:
    return Fidelity(
        text="t",
        tokens=10,
        perplexity_merged=5.0,
        perplexity_export=5.0 * ratio,
        perplexity_ratio=ratio,
        token_kl=kl,
        top1_agreement=top1,
    )


def test_small_and_large_models_have_their_limits() -> None:
    for size in (1, 10**6, 270 * 10**6, 10**9):
        limits = limits_for(size)
        assert (limits.ppl_ratio, limits.kl, limits.top1) == (1.03, 0.06, 0.88)
    for size in (7 * 10**9, 10**12):
        limits = limits_for(size)
        assert (limits.ppl_ratio, limits.kl, limits.top1) == pytest.approx((1.01, 0.01, 0.97))


def test_between_them_limits_move_with_the_logarithm_of_the_size() -> None:
    middle = limits_for(round(math.sqrt(7.0) * 1e9))
    assert (middle.ppl_ratio, middle.kl, middle.top1) == pytest.approx((1.02, 0.035, 0.925))


def test_each_figure_gets_its_verdict() -> None:
    verdicts = judge_fidelity(fidelity(1.031, 0.06, 0.879), 10**8, ExportConfig())
    assert [verdict.passed for verdict in verdicts] == [False, True, False]
    assert str(verdicts[0]) == "1.031 (0.9709 to 1.03): MISSED"
    assert str(verdicts[2]) == "87.90% (at least 88.00%): MISSED"


def test_the_users_limits_count_and_zero_is_one() -> None:
    settings = ExportConfig(max_ppl_ratio=1.2, max_kl=0.0, min_top1=0.5)
    verdicts = judge_fidelity(fidelity(1.1, 0.001, 0.6), 10**11, settings)
    assert [verdict.passed for verdict in verdicts] == [True, False, True]
    assert verdicts[1].limit == 0.0


def test_what_is_no_number_passes_nothing() -> None:
    verdicts = judge_fidelity(fidelity(math.nan, math.nan, math.nan), 10**8, ExportConfig())
    assert not any(verdict.passed for verdict in verdicts)


def loss(trained: float, export: float, error: float = 0.0) -> TaskLoss:
    return TaskLoss(
        kind="evaluation",
        rows=3,
        tokens=9,
        adapter=True,
        trained=trained,
        export=export,
        error=error,
    )


def test_a_perplexity_that_falls_far_is_no_copy_either() -> None:
    for value, error, passed in ((0.8091, 0.05, False), (0.97, 0.0005, False), (0.97, 0.001, True)):
        figures = replace(fidelity(value), ratio_error=error)
        assert judge_fidelity(figures, 10**8, ExportConfig())[0].passed == passed
    loose = ExportConfig(max_ppl_ratio=1.25)
    assert judge_fidelity(fidelity(0.8091), 10**8, loose)[0].passed


def test_a_rise_counts_where_it_is_more_than_chance() -> None:
    for value, error, passed in ((1.034, 0.0045, True), (1.034, 0.002, False), (1.03, 0.0, True)):
        figures = replace(fidelity(value), ratio_error=error)
        assert judge_fidelity(figures, 10**8, ExportConfig())[0].passed == passed
    shown = judge_fidelity(replace(fidelity(1.034), ratio_error=0.0045), 10**8, ExportConfig())[0]
    assert str(shown) == "1.034 ± 0.0045 (0.9709 to 1.03): passed"


def test_a_loss_may_rise_and_fall_but_little() -> None:
    assert judge_loss(loss(2.0, 2.01), ExportConfig()).passed
    assert judge_loss(loss(2.0, 1.9901), ExportConfig()).passed
    assert not judge_loss(loss(6.5847, 5.4271, 0.01), ExportConfig()).passed
    assert judge_loss(loss(2.0, 1.97, 0.0101), ExportConfig()).passed  # -1.5%, or maybe -0.49%
    missed = judge_loss(loss(2.0, 2.011), ExportConfig())
    assert not missed.passed and str(missed) == "0.55% (-0.50% to 0.50%): MISSED"
    assert judge_loss(loss(2.0, 2.011), ExportConfig(max_loss_increase=0.01)).passed
    assert not judge_loss(loss(2.0, math.nan), ExportConfig()).passed
    assert str(loss(2.0, 2.002)) == "adapter 2.0000, export 2.0020"
    shown = str(judge_loss(loss(2.0, 2.002, 0.003), ExportConfig()))
    assert shown == "0.10% ± 0.30% (-0.50% to 0.50%): passed"


def test_a_rise_within_its_standard_error_is_none() -> None:
    assert judge_loss(loss(2.0, 2.03, 0.0101), ExportConfig()).passed  # +1.5%, or maybe 0.49%
    assert not judge_loss(loss(2.0, 2.03, 0.0099), ExportConfig()).passed
    assert not judge_loss(loss(2.0, 2.03, math.nan), ExportConfig()).passed


def test_off_is_a_word_in_yaml_too(tmp_path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("model_type: tiny\nexport:\n  fidelity: off\n  smoke: off\n")
    config = compose_config(str(file), ["dataset=quickstart"]).config
    assert (config.export.fidelity, config.export.smoke) == ("off", "off")
    config = compose_config(str(file), ["export.fidelity=fail", "export.smoke=off"]).config
    assert (config.export.fidelity, config.export.smoke) == ("fail", "off")
