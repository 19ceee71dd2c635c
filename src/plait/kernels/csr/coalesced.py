"""CSR matrices for torch, whose MKL reads their arrays on trust: columns sorted, every entry once."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["torch_csr"]


def torch_csr(
    indptr: np.ndarray[Any, Any], indices: np.ndarray[Any, Any], values: Tensor, num_columns: int
) -> Tensor:
    """The matrix of these CSR arrays as torch CSR, entries of the same place added up.

    MKL may crash on columns that repeat or are not sorted; it does so on some processors only.
    """
    rows, index = len(indptr) - 1, torch.from_numpy(indices[:0]).dtype
    of_row = np.repeat(np.arange(rows), np.diff(indptr))
    is_step = np.diff(indices.astype(np.int64)) > 0
    if bool(np.all(is_step | (np.diff(of_row) > 0))):
        pointer, columns = torch.from_numpy(np.asarray(indptr)), torch.from_numpy(np.asarray(indices))
    else:
        places = torch.from_numpy(np.stack([of_row, indices.astype(np.int64)]))
        shape = (rows, num_columns)
        whole = torch.sparse_coo_tensor(places, values.detach(), shape, check_invariants=False).coalesce()
        counts = torch.bincount(whole.indices()[0], minlength=rows)
        pointer = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        columns, values = whole.indices()[1], whole.values()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "CSR support is in beta state"
        columns = columns.to(index).contiguous()  # torch 2.11 insists where there are none
        return torch.sparse_csr_tensor(
            pointer.to(index), columns, values, (rows, num_columns), check_invariants=False
        )
