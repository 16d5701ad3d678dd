"""The enums of the public interface."""

from __future__ import annotations

import pickle

from acc_ops.enums import (
    BaseEnum,
    CustomDtype,
    DistributedType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
)


def test_values_are_members_and_other_words_are_not():
    assert "bf16" in PrecisionType
    assert PrecisionType.BF16 in PrecisionType
    assert "bf17" not in PrecisionType
    assert None not in LoggerType


def test_text_of_a_base_enum_is_its_value():
    assert str(LoggerType.COMETML) == "comet_ml"
    assert str(DynamoBackend.INDUCTOR) == "INDUCTOR"
    assert f"{PrecisionType.FP16}" == "fp16"
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]


def test_a_distributed_type_equals_its_text_but_prints_its_name():
    assert DistributedType.NO == "NO"
    assert str(DistributedType.NO) == "DistributedType.NO"


def test_a_generator_type_is_no_text():
    assert RNGType.CUDA != "cuda"
    assert RNGType("cuda") is RNGType.CUDA


def test_a_custom_dtype_is_a_plain_enum():
    assert str(CustomDtype.INT4) == "CustomDtype.INT4"


def test_members_survive_pickling():
    for member in (PrecisionType.FP16, LoggerType.ALL, DistributedType.FSDP):
        assert pickle.loads(pickle.dumps(member)) is member


def test_own_enums_can_be_derived():
    class Colour(BaseEnum):
        RED = "red"

    assert Colour.list() == ["red"]
    assert "red" in Colour
