import numpy as np
import onnx
import pytest
from small_graphs import make_graph, make_observations

from policy_server.export.errors import ExportError
from policy_server.export.precision import convert, to_half_compute
from policy_server.export.precision.linear_layers import find_linear_layers
from policy_server.export.precision.sensitivity import keep_fewest, open_session, rank_layers
from policy_server.export.precision.storage import block_size, quantize_int8, rounded
from policy_server.manifest import Precision

LOWER = (Precision.FP16, Precision.INT8)
UNIT = {"action": np.ones(4)}


def act(model: onnx.ModelProto, observations: dict[str, np.ndarray]) -> np.ndarray:
    return open_session(model).run(None, observations)[0]


@pytest.mark.parametrize("width", [32, 40, 256, 300])
@pytest.mark.parametrize("precision", LOWER)
def test_a_converted_graph_is_close_to_fp32_at_odd_widths_and_smaller(precision: Precision, width: int) -> None:
    model, observations = make_graph(width=width), make_observations(65, seed=7)
    result = convert(model, precision, make_observations(64), output_scale=UNIT)
    error = np.abs(act(result.model, observations) - act(model, observations)).max()
    assert 0 < error < 2 * result.report.tolerance
    assert len(result.model.SerializeToString()) < (0.75 if width < 64 else 0.6) * len(model.SerializeToString())
    assert result.report.weight_bytes < result.report.fp32_weight_bytes


def test_the_error_reported_is_the_one_measured_on_the_calibration_observations() -> None:
    model, observations = make_graph(), make_observations(64)
    half = {"action": np.full(4, 0.5)}
    result = convert(model, Precision.INT8, observations, output_scale=half)
    error = np.abs(act(result.model, observations) - act(model, observations)).max() / 0.5
    assert result.report.error == pytest.approx(error, rel=1e-6)


def test_the_fp32_graph_is_left_as_it_was() -> None:
    model = make_graph()
    before = model.SerializeToString(deterministic=True)
    for precision in LOWER:
        convert(model, precision)
    to_half_compute(model)
    assert model.SerializeToString(deterministic=True) == before


def test_fp32_changes_nothing() -> None:
    model = make_graph()
    result = convert(model, Precision.FP32)
    assert result.model is model
    assert result.report.error == 0


def test_int8_keeps_the_layers_at_both_ends_in_fp32_and_says_why() -> None:
    report = convert(make_graph(depth=5), Precision.INT8).report
    assert {one.name: one.reason for one in report.kept} == {
        "layer0/linear": "reads the observation",
        "head/mean": "makes an output",
    }
    assert (report.num_layers, report.num_converted) == (6, 4)
    assert report.channel_scales == 4 * 32


def test_an_int8_row_does_not_depend_on_its_batch() -> None:
    model = convert(make_graph(), Precision.INT8).model
    observations = make_observations(8)
    alone = act(model, {name: values[:1] for name, values in observations.items()})
    loud = {name: np.concatenate([values[:1], 1000 * values[1:]]) for name, values in observations.items()}
    np.testing.assert_allclose(act(model, loud)[:1], alone, atol=1e-6)


def test_a_layer_that_8_bits_destroy_is_found_and_kept() -> None:
    model = make_graph(depth=6, outlier_layer=3)
    result = convert(model, Precision.INT8, make_observations(64), output_scale=UNIT, tolerance=0.05)
    sensitive = {one.name for one in result.report.kept if one.reason.startswith("sensitive")}
    assert "layer3/linear" in sensitive
    assert len(sensitive) < 5
    assert result.report.error <= 0.05 < result.report.error_all_converted
    assert any(node.name == "layer3/linear" and node.op_type == "Gemm" for node in result.model.graph.node)


def test_ranking_puts_the_destroyed_layer_first() -> None:
    model = make_graph(depth=6, outlier_layer=2)
    layers, _ = find_linear_layers(model)
    ranked = rank_layers(
        model, layers[1:-1], Precision.INT8, make_observations(16), lambda a, b: float(np.abs(a[0] - b[0]).max())
    )
    assert ranked[0].layers[0].name == "layer2/linear"
    assert [group.error for group in ranked] == sorted((group.error for group in ranked), reverse=True)


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 9, 10])
def test_as_few_layers_as_possible_are_kept(needed: int) -> None:
    model = make_graph(depth=11)
    layers = find_linear_layers(model)[0][1:-1]
    ranked = rank_layers(model, layers, Precision.INT8, make_observations(4), lambda a, b: 0.0)
    kept = keep_fewest(ranked, lambda kept: 0.0 if len(kept) >= needed else 1.0, 0.5)
    assert len(kept) == needed


def test_a_tolerance_nothing_can_meet_is_refused() -> None:
    with pytest.raises(ExportError, match=r"precision=int8: even one layer.*1e-12.*fp32"):
        convert(make_graph(outlier_layer=2), Precision.INT8, make_observations(16), tolerance=1e-12)


def test_a_graph_with_nothing_to_convert_is_refused() -> None:
    with pytest.raises(ExportError, match=r"precision=int8: no layer.*reads the observation.*--precision fp32"):
        convert(make_graph(depth=1), Precision.INT8)


def test_a_missing_calibration_input_is_named() -> None:
    with pytest.raises(ExportError, match="'observation' is missing"):
        convert(make_graph(), Precision.INT8, {"goal": np.zeros((2, 3), np.float32)})


def test_a_weight_beyond_half_precision_stays_in_fp32() -> None:
    model = make_graph()
    constant = next(one for one in model.graph.initializer if one.name == "layer2/linear.weight")
    values = onnx.numpy_helper.to_array(constant).copy()
    values[0, 0] = 1e5
    constant.CopyFrom(onnx.numpy_helper.from_array(values, constant.name))
    report = convert(model, Precision.FP16, tolerance=1.0).report
    assert [one.name for one in report.kept] == ["layer2/linear"]
    assert "1e+05" in report.kept[0].reason


def test_a_weight_two_layers_share_is_converted_for_both() -> None:
    model, observations = make_graph(depth=5), make_observations(16)
    for node in model.graph.node:
        if node.name == "layer3/linear":
            node.input[1] = "layer2/linear.weight"
    expected = act(model, observations)
    for precision in LOWER:
        result = convert(model, precision, observations, output_scale=UNIT)
        np.testing.assert_allclose(act(result.model, observations), expected, atol=0.1)
        assert not any(one.name == "layer2/linear.weight" for one in result.model.graph.initializer)


@pytest.mark.parametrize("shape", [(5, 16), (7, 33), (3, 256), (4, 300)])
def test_quantised_weights_are_within_half_a_step_of_their_channel(shape: tuple[int, int]) -> None:
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weight[1] = 0
    values, scales = quantize_int8(weight)
    size = block_size(shape[1])
    assert values.shape == (shape[0], -(-shape[1] // size), size)
    steps = np.repeat(scales, size, axis=1)[:, : shape[1]]
    assert (np.abs(rounded(weight, Precision.INT8) - weight) <= steps / 2 + 1e-7).all()
    assert (rounded(weight, Precision.INT8)[1] == 0).all()


def test_half_compute_multiplies_in_half_and_normalises_in_fp32() -> None:
    model, observations = make_graph(), make_observations(33)
    mixed, names = to_half_compute(model)
    assert names == [f"layer{index}/linear" for index in range(1, 6)]
    inferred = onnx.shape_inference.infer_shapes(mixed, strict_mode=True)
    types = {one.name: one.type.tensor_type.elem_type for one in inferred.graph.value_info}
    for node in mixed.graph.node:
        if node.op_type == "LayerNormalization":
            assert types[node.input[0]] == types[node.output[0]] == onnx.TensorProto.FLOAT
        if node.op_type == "Gemm":
            half = node.name in names
            assert types[node.input[0] if half else node.output[0]] == (
                onnx.TensorProto.FLOAT16 if half else onnx.TensorProto.FLOAT
            )
    difference = np.abs(act(mixed, observations) - act(model, observations)).max()
    assert 0 < difference < 5e-3


def test_the_report_speaks_of_every_kept_layer() -> None:
    report = convert(make_graph(), Precision.INT8).report
    text = "\n".join(report.lines())
    assert all(one.name in text and one.reason in text for one in report.kept)
    assert report.as_dict()["precision"] == "int8"
