"""Products with one packed matrix of the named models, by their configurations."""

from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.leaf_kinds import leaves_of
from moejax.models.shapes import SHAPES
from tests.kernel_shapes import PRODUCTS

# All that is ever packed but for routed experts, which are products of their own, embeddings and
# heads.
LEAVES = leaves_of("attention", "shared_experts", "mlp")


def products_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Leaf -> K, N."""
    of_leaf = weight_shapes(config)
    return {leaf: of_leaf[leaf][:-3:-1] for leaf in LEAVES if leaf in of_leaf}


def _dense_shapes() -> dict[str, tuple[int, int]]:
    """The kernels' own table, and what models have beside it, each shape once beyond the table."""
    found = dict(PRODUCTS)
    for model, config in SHAPES.items():
        for leaf, shape in products_of(config).items():
            if shape not in found.values():
                found[f"{model}_{leaf}".lower().replace("-", "_").replace(".", "_")] = shape
    return found


# name -> K, N, what contracts and tests of tiles go through.
DENSE_SHAPES = _dense_shapes()
