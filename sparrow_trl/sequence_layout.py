"""
Where the sequences of a batch lie: one in each row, with padding on either side, or packed one after the other in a
single row.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F


# A plain class, since FSDP takes a module's dataclass arguments apart and copies them.
class SequenceLayout:
    """
    Place of each sequence of a batch, from what a forward pass is told.

    Sequences are packed if `cu_seq_lens` is given, or if there is no `attention_mask` and `position_ids` restart
    within a row. Otherwise each row is one sequence.

    Args:
        batch (`int`):
            Rows of the batch.
        tokens (`int`):
            Tokens in each row, padding included.
        device (`torch.device`):
            Device of the layout's tensors.
        attention_mask (`torch.Tensor` of shape `[batch, tokens]`, *optional*):
            1 for real tokens and 0 for padding, by default all real.
        position_ids (`torch.Tensor` of shape `[batch, tokens]` or `[1, tokens]`, *optional*):
            Positions, which must count the tokens of each sequence from 0. Those of padding may be anything.
        cu_seq_lens (`torch.Tensor` of shape `[sequences + 1]`, *optional*):
            First token of each packed sequence, and the number of tokens.

    Attributes:
        starts (`torch.Tensor` of shape `[sequences]`):
            Column of the first token of each sequence.
        lengths (`torch.Tensor` of shape `[sequences]`):
            Tokens of each sequence.
        packed (`bool`):
            Whether the sequences lie in one row.
        spans (`list[tuple[int, int]]`):
            Both of these in Python, a tuple for each sequence.
        padded (`bool`):
            Whether there are tokens of no sequence.

    Raises:
        ValueError: for a mask of another shape or with holes, for positions that do not count from 0 in each sequence,
            and for packed sequences in a batch of several rows or with an attention mask.
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        device: torch.device,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seq_lens: torch.Tensor | None = None,
    ):
        if position_ids is not None:
            if tuple(position_ids.shape) not in ((batch, tokens), (1, tokens)):
                raise ValueError(
                    f"Sparse attention needs `position_ids` of shape [batch, tokens] = {[batch, tokens]}, got "
                    f"{list(position_ids.shape)}."
                )
            position_ids = position_ids.to(device)
        bounds = _packed_bounds(batch, tokens, attention_mask, position_ids, cu_seq_lens)
        self.packed = bounds is not None
        if self.packed:
            self.starts = torch.tensor(bounds[:-1], device=device)
            self.lengths = torch.tensor(bounds, device=device).diff()
        else:
            self.starts, self.lengths = _real_tokens(batch, tokens, device, attention_mask)
        self.spans = list(zip(self.starts.tolist(), self.lengths.tolist(), strict=True))
        self.padded = sum(length for _, length in self.spans) < batch * tokens
        self._positions = torch.arange(tokens, device=device) - (
            self.starts.repeat_interleave(self.lengths) if self.packed else self.starts[:, None]
        )
        if position_ids is not None:
            self._check_positions(position_ids)

    @property
    def position_ids(self) -> torch.Tensor:
        """
        Positions of shape `[batch, tokens]` that count from 0 in each sequence. Padding on its left is at 0 too, and
        on its right positions go on.
        """
        return self._positions.clamp(min=0).view(-1, self._positions.shape[-1])

    def check_prompt_lengths(self, prompt_lengths: torch.Tensor) -> torch.Tensor:
        """
        `prompt_lengths` on the layout's device. Raises a `ValueError` unless there is one for each sequence, and for
        packed sequences with longer prompts, whose lengths must be in another order.
        """
        prompt_lengths = torch.as_tensor(prompt_lengths).to(self.starts.device)
        if prompt_lengths.shape != self.starts.shape:
            count = len(self.spans)
            held = f"packed row holds {count} sequences" if self.packed else f"batch has {count} rows"
            raise ValueError(f"`prompt_lengths` has shape {list(prompt_lengths.shape)}, but the {held}.")
        if self.packed and (longer := (prompt_lengths > self.lengths).nonzero()).numel():
            index = int(longer[0])
            raise ValueError(
                f"`prompt_lengths` gives the prompt of packed sequence {index} {int(prompt_lengths[index])} tokens, "
                f"but the sequence has {self.spans[index][1]}. The lengths come in the order of the sequences."
            )
        return prompt_lengths

    def attend(self, function: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """
        Attention within each sequence by itself: `[batch, tokens, q_heads, head_dim]`, zeros at padding.

        Args:
            function (`Callable`):
                Takes the number of a sequence and its parts of `query`, `key` and `value`, and returns the output of
                shape `[1, length, q_heads, head_dim]`.
            query, key, value (`torch.Tensor` of shape `[batch, heads, tokens, head_dim]`):
                As attention functions of transformers get them.
        """
        outputs = []
        for index, parts in enumerate(zip(*map(self._split, (query, key, value)), strict=True)):
            empty = not parts[0].shape[2]
            outputs.append(query.new_zeros(1, 0, query.shape[1], value.shape[3]) if empty else function(index, *parts))
        if self.packed:
            return torch.cat(outputs, dim=1)
        tokens = query.shape[2]
        return torch.cat(
            [
                F.pad(output, (0, 0, 0, 0, start, tokens - start - length))
                for output, (start, length) in zip(outputs, self.spans, strict=True)
            ]
        )

    def _split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The part of `x [batch, heads, tokens, head_dim]` that belongs to each sequence."""
        # Slices of a packed row would each get a gradient as long as the row.
        if self.packed:
            return x.split([length for _, length in self.spans], dim=2)
        return [row.narrow(2, *span) for row, span in zip(x.split(1), self.spans, strict=True)]

    def _check_positions(self, position_ids: torch.Tensor):
        positions, column = self._positions, torch.arange(self._positions.shape[-1], device=self.starts.device)
        wrong = position_ids != positions
        if not self.packed:
            wrong &= (positions >= 0) & (column < (self.starts + self.lengths)[:, None])
        if not wrong.any():
            return
        row, token = wrong.nonzero()[0].tolist()
        if self.packed:
            advice = (
                "Packed sequences lie one after the other, without padding, and `position_ids` restart at 0 with each."
            )
        else:
            advice = (
                "Padding is not counted: pass `position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0)`. Packed "
                "sequences come without `attention_mask`."
            )
        position = int(position_ids.expand_as(wrong)[row, token])
        raise ValueError(
            "Sparse attention needs `position_ids` that count the tokens of each sequence from 0, as sparse rollouts "
            f"do, but token {token} of row {row} is at position {position}. {advice}"
        )


def _packed_bounds(
    batch: int,
    tokens: int,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None,
) -> list[int] | None:
    """First token of each packed sequence, and the number of tokens; `None` when sequences are not packed."""
    if cu_seq_lens is not None:
        bounds = cu_seq_lens.tolist()
        if bounds != sorted(set(bounds)) or bounds[:1] != [0] or bounds[-1] != tokens:
            raise ValueError(
                f"The cumulative lengths of packed sequences must increase from 0 to the row's {tokens} tokens, got "
                f"{bounds}."
            )
    elif attention_mask is None and position_ids is not None and (breaks := position_ids.diff(dim=-1) != 1).any():
        bounds = [0, *(breaks[0].nonzero().flatten() + 1).tolist(), tokens]
    else:
        return None
    if batch != 1:
        raise ValueError(
            f"Packed sequences come in a batch of one row, as padding-free collators make them, got {batch} rows. For "
            "padded rows pass `attention_mask`."
        )
    if attention_mask is not None:
        raise ValueError("Packed sequences come without `attention_mask`: it cannot tell them apart.")
    return bounds


def _real_tokens(
    batch: int, tokens: int, device: torch.device, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """First real token and number of real tokens of each row."""
    if attention_mask is None:
        return torch.zeros(batch, dtype=torch.long, device=device), torch.full((batch,), tokens, device=device)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != (batch, tokens):
        shape = (
            list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
        )
        raise ValueError(
            f"Sparse attention needs an attention mask of shape [batch, tokens] = {[batch, tokens]}, got {shape}."
        )
    mask = attention_mask.to(device).bool()
    starts, lengths = mask.int().argmax(-1), mask.sum(-1)
    column = torch.arange(tokens, device=device)
    if (mask != ((column >= starts[:, None]) & (column < (starts + lengths)[:, None]))).any():
        raise ValueError("Sparse attention needs the real tokens of each row side by side; the mask has holes.")
    return starts, lengths
