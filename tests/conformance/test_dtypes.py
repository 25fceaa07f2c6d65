"""Which dtype an op runs in, what that does to its numbers, and to gradients, whatever the framework."""

from __future__ import annotations

from typing import Any

import pytest

from .backend import MATRIX, OTHER_LOW
from .backends import BACKENDS

# Op, dtypes of its inputs, dtype of its result; "low" is the region's dtype, "other" the second lower-precision dtype.
TABLE = [
    ("matmul", ("float32", "float32"), "low"),
    ("matmul", ("low", "float32"), "low"),
    ("matmul", ("float32", "low"), "low"),
    ("matmul", ("other", "float32"), "low"),
    ("matmul", ("other", "other"), "low"),
    ("matmul", ("float64", "float64"), "float64"),
    ("matmul", ("int64", "int64"), "int64"),
    ("softmax", ("float32",), "float32"),
    ("softmax", ("low",), "float32"),
    ("softmax", ("other",), "float32"),
    ("softmax", ("float64",), "float64"),
    ("sum", ("low",), "float32"),
    ("sum", ("float64",), "float64"),
    ("sum", ("int64",), "int64"),
    ("cross", ("low", "low"), "low"),
    ("cross", ("low", "float32"), "float32"),
    ("cross", ("float32", "low"), "float32"),
    ("cross", ("low", "other"), "float32"),
    ("cross", ("other", "low"), "float32"),
    ("cross", ("float64", "float64"), "float64"),
    ("cross", ("int64", "int64"), "int64"),
    ("relu", ("float32",), "float32"),
    ("relu", ("low",), "low"),
    ("relu", ("other",), "other"),
    ("relu", ("float64",), "float64"),
]


def case_id(part: Any) -> str:
    return part if isinstance(part, str) else "+".join(part)


@pytest.mark.parametrize(("op", "inputs", "expected"), TABLE, ids=case_id)
def test_the_unified_policy_gives_each_op_its_dtype(backend, low, op, inputs, expected):
    names = {"low": low, "other": OTHER_LOW[low]}
    arrays = [backend.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], names.get(dtype, dtype)) for dtype in inputs]
    with backend.region(low, policy="unified"):
        result = getattr(backend, op)(*arrays)
    assert backend.dtype_name(result) == names.get(expected, expected)


def test_a_lower_precision_product_holds_the_numbers_that_the_dtype_can(backend, low):
    # 257 needs nine bits and 2049 twelve; bfloat16 has eight and float16 eleven.
    odd = {"bfloat16": 257.0, "float16": 2049.0}[low]
    row, column = backend.array([[odd]], "float32"), backend.array([[1.0]], "float32")
    with backend.region(low):
        assert backend.numbers(backend.matmul(row, column)) == [odd - 1]
    assert backend.numbers(backend.matmul(row, column)) == [odd]


# One rounding to a lower dtype is a relative error of at most half its epsilon, 2**-8 or 2**-11. The loss below rounds
# inputs, weight, products and gradients, six times in all; relative to the largest element that stays below these.
TOLERANCE = {"bfloat16": 2**-5, "float16": 2**-8}


POLICIES = [
    pytest.param(backend, policy, id=f"{backend.name}-{policy}") for backend in BACKENDS for policy in backend.policies
]


@pytest.mark.parametrize(("backend", "policy"), POLICIES)
def test_the_gradient_of_a_float32_weight_is_float32_and_near_the_reference(backend, low, policy):
    x = backend.array(MATRIX, "float32")
    weight = backend.array([[0.3, -0.7, 1.1], [0.9, 0.2, -0.6], [-1.3, 0.4, 0.8]], "float32")
    products = []

    def loss(w: Any) -> Any:
        product = backend.matmul(x, w)
        products.append(backend.dtype_name(product))
        return backend.sum(backend.matmul(product, product))

    reference = backend.numbers(backend.gradient(loss, weight))
    with backend.region(low, policy=policy):
        gradient = backend.gradient(loss, weight)
    assert products == ["float32", "float32" if policy == "fp32" else low]
    assert backend.dtype_name(gradient) == "float32"
    difference = max(abs(a - b) for a, b in zip(backend.numbers(gradient), reference, strict=True))
    assert difference <= TOLERANCE[low] * max(map(abs, reference))
    assert (difference == 0) == (policy == "fp32")
