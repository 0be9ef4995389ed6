"""Rows of `mimo inspect`: equal tensors of stacked and of single layers and experts."""

from mimo.commands.compare import StoredInfo, rows_of


def stored(name: str, *shape: int, dtype: str = "bfloat16") -> StoredInfo:
    return StoredInfo(f"language.{name}", "language", "weights", name, shape, dtype, 1, 2)


def test_stacked_axes_become_ranges():
    rows = rows_of([stored("decoder.layers.mlp.experts.experts.linear_fc1.weight", 4, 8, 64, 32),
                    stored("decoder.layers.mlp.router.weight", 4, 8, 32), stored("decoder.final_layernorm.weight", 32)])
    assert [(row.name, row.count, row.shape) for row in rows] == [
        ("decoder.layers.{0-3}.mlp.experts.{0-7}.linear_fc1.weight", 32, (64, 32)),
        ("decoder.layers.{0-3}.mlp.router.weight", 4, (8, 32)),
        ("decoder.final_layernorm.weight", 1, (32,)),
    ]
    assert [row.numel for row in rows] == [32 * 64 * 32, 4 * 8 * 32, 32]


def test_single_layers_are_put_together_where_they_are_equal():
    """A block with dense and mixture-of-experts layers is not stacked."""
    names = {0: "mlp.linear_fc1.weight", 1: "mlp.experts.experts.linear_fc1.weight",
             2: "mlp.experts.experts.linear_fc1.weight", 4: "mlp.experts.experts.linear_fc1.weight"}
    tensors = [stored(f"decoder.layers.{number}.{name}", *((64, 32) if number == 0 else (2, 16, 32)))
               for number, name in names.items()]
    tensors.append(stored("decoder.layers.5.mlp.experts.experts.linear_fc1.weight", 2, 16, 32, dtype="float32"))
    assert [(row.name, row.count, row.dtype, row.num_bytes) for row in rows_of(tensors)] == [
        ("decoder.layers.0.mlp.linear_fc1.weight", 1, "bfloat16", 2),
        ("decoder.layers.{1-2,4}.mlp.experts.{0-1}.linear_fc1.weight", 6, "bfloat16", 6),
        ("decoder.layers.5.mlp.experts.{0-1}.linear_fc1.weight", 2, "float32", 2),
    ]
