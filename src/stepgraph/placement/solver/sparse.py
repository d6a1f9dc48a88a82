"""Columns and rows of an integer program, as HiGHS takes them."""

from __future__ import annotations

import highspy
import numpy as np


class SparseProgram:
    """Columns and rows of the integer program, collected as sparse arrays."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.most: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.entries: list[tuple[int, int, float]] = []  # row, column, value

    def row(self, lower: float, upper: float) -> int:
        """A new row between two bounds; its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        return len(self.lower) - 1

    def column(self, cost: float, most: float = 1.0) -> int:
        """All are between 0 and ``most``: flows are so by themselves, but presolve may not end untold."""
        self.costs.append(cost)
        self.most.append(most)
        return len(self.costs) - 1

    def put(self, row: int, column: int, value: float) -> None:
        """An entry; one at each place."""
        self.entries.append((row, column, value))

    def pass_to(self, highs: highspy.Highs, whole: int) -> None:
        """Hands everything over; the first ``whole`` columns are integral."""
        lp = highspy.HighsLp()
        columns, rows = len(self.costs), len(self.lower)
        lp.num_col_, lp.num_row_ = columns, rows
        lp.col_cost_ = np.array(self.costs)
        lp.col_lower_ = np.zeros(columns)
        lp.col_upper_ = np.array(self.most)
        lp.row_lower_, lp.row_upper_ = np.array(self.lower), np.array(self.upper)
        table = np.array(self.entries).reshape(-1, 3)
        order = np.lexsort((table[:, 0], table[:, 1]))
        table = table[order]
        counts = np.bincount(table[:, 1].astype(int), minlength=columns)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lp.a_matrix_.index_ = table[:, 0].astype(np.int32)
        lp.a_matrix_.value_ = table[:, 2]
        kinds = [highspy.HighsVarType.kInteger] * whole
        lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (columns - whole)
        highs.passModel(lp)
