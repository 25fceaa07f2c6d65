"""Sample calls: losses, norms, and what is summed up."""

from __future__ import annotations

import numpy as np

from tests.tensorplay.op_samples import Call, call, integers, normal, positive, spread, unit

__all__ = ["LOSSES"]

X, Y, Q = normal(3, 4), positive(3, 4), unit(3, 4)
SIGNS = np.asarray([[1, -1, 1, 1], [-1, 1, -1, 1], [1, 1, -1, -1]], dtype=np.float32)
CLASSES = integers(0, 2, 1)
IMAGE = normal(2, 4, 3)

LOSSES: list[Call] = [
    call("_log_softmax", X, 1, False),
    call("_softmax", X, 1, False),
    call("batch_norm", IMAGE, positive(4), normal(4), None, None, True, 0.1, 1e-5),
    call("binary_cross_entropy", Q, unit(4, 3).T.copy()),
    call("binary_cross_entropy_with_logits", X, Q),
    call("cosine_embedding_loss", X, Y, SIGNS[0, :3]),
    call("cosine_similarity", X, Y),
    call("cross_entropy_loss", X, CLASSES),
    call("ctc_loss", normal(5, 2, 4), integers([1, 2], [1, 3]), integers(5, 5), integers(2, 2)),
    call("_ctc_loss", normal(5, 2, 4), integers([1, 2], [1, 3]), integers(5, 5), integers(2, 2)),
    call("cumprod", Y, 1),
    call("cumsum", X, 1),
    call("dist", X, Y, 2),
    call("group_norm", IMAGE, 2, positive(4), normal(4)),
    call("hinge_embedding_loss", X, SIGNS),
    call("huber_loss", X, Y),
    call("instance_norm", IMAGE, positive(4), normal(4), None, None, True, 0.1, 1e-5),
    call("kl_div", X, Q),
    call("l1_loss", X, Y),
    call("layer_norm", X, [4], positive(4), normal(4)),
    call("log_softmax", X, 1),
    call("logsumexp", X, 1),
    call("margin_ranking_loss", X, Y, SIGNS),
    call("mse_loss", X, Y),
    call("multi_margin_loss", spread(3, 4), CLASSES),
    call("multilabel_margin_loss", spread(3, 4), integers([0, 2, -1, -1], [1, -1, -1, -1], [3, 0, -1, -1])),
    call("multilabel_margin_loss_forward", spread(3, 4), integers([0, 2, -1, -1], [1, -1, -1, -1], [3, 0, -1, -1]), 1),
    call("multilabel_soft_margin_loss", X, Q),
    call("native_layer_norm", X, [4], positive(4), normal(4), 1e-5),
    call("nll_loss", X, CLASSES),
    call("nll_loss2d", normal(2, 4, 2, 2), integers([[0, 1], [2, 3]], [[3, 2], [1, 0]])),
    call("norm", X),
    call("pairwise_distance", X, Y),
    call("pdist", X, 2.0),
    call("cdist", X, normal(5, 4)),
    call("poisson_nll_loss", X, Y),
    call("prod", Y),
    call("renorm", X, 2, 0, 1.0),
    call("rms_norm", X, [4], positive(4)),
    call("smooth_l1_loss", X, Y),
    call("soft_margin_loss", X, SIGNS),
    call("softmax", X, 1),
    call("softplus", X),
    call("sum", X),
    call("mean", X),
    call("tp_cosine_embedding_loss", X, Y, SIGNS[0, :3]),
    call("tp_hinge_embedding_loss", X, SIGNS),
    call("tp_kl_div", X, Q),
    call("tp_l1_loss", X, Y),
    call("tp_margin_ranking_loss", X, Y, SIGNS),
    call("tp_poisson_nll_loss", X, Y),
    call("tp_soft_margin_loss", X, SIGNS),
    call("triplet_margin_loss", X, Y, Q),
    call("linalg_vector_norm", X),
    call("linalg_matrix_norm", X),
    call("nanquantile", spread(3, 4), 0.25),
    call("quantile", spread(3, 4), 0.25),
    call("logcumsumexp", X, 1),
    call("var", X),
    call("std", X),
]
