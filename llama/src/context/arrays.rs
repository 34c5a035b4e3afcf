//! The arrays of a `llama_batch`, kept from call to call.

use llama_sys as sys;

use crate::batch::{RowInput, Rows};

/// Owns what a [`sys::llama_batch`] points to.
#[derive(Debug)]
pub(crate) struct BatchArrays {
    n_embd: usize,
    /// 1, or 4 for M-RoPE.
    positions_per_row: usize,
    /// Rows that had to be rearranged.
    embd: Vec<f32>,
    tokens: Vec<sys::llama_token>,
    positions: Vec<sys::llama_pos>,
    n_seq_id: Vec<i32>,
    seq_id: Vec<sys::llama_seq_id>,
    /// Pointers into `seq_id`, and a null after them.
    seq_ids: Vec<*mut sys::llama_seq_id>,
    outputs: Vec<i8>,
}

/// Which rows become outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Marks {
    /// All: hidden rows are only computed for outputs in the last block.
    All,
    /// Those the caller marked.
    AsGiven,
}

impl BatchArrays {
    pub(crate) fn new(n_embd: usize, positions_per_row: usize) -> Self {
        Self {
            n_embd,
            positions_per_row,
            embd: Vec::new(),
            tokens: Vec::new(),
            positions: Vec::new(),
            n_seq_id: Vec::new(),
            seq_id: Vec::new(),
            seq_ids: Vec::new(),
            outputs: Vec::new(),
        }
    }

    /// A batch of the rows with the indices `order`, in that order. It points into `rows` and into `self`, and is
    /// valid until either changes.
    pub(crate) fn fill(&mut self, rows: &Rows<'_>, order: &[usize], marks: Marks) -> sys::llama_batch {
        self.fill_positions(rows, order);
        self.n_seq_id.clear();
        self.n_seq_id.resize(order.len(), 1);
        self.seq_id.clear();
        self.seq_id.extend(order.iter().map(|row| rows.slots[*row] as sys::llama_seq_id));
        self.seq_ids.clear();
        self.seq_ids.extend(self.seq_id.iter_mut().map(std::ptr::from_mut));
        self.seq_ids.push(std::ptr::null_mut());
        self.outputs.clear();
        self.outputs.extend(order.iter().map(|row| i8::from(marks == Marks::All || rows.outputs[*row])));
        let (token, embd) = match rows.input {
            RowInput::Hidden(hidden) => (std::ptr::null_mut(), self.embd_of(hidden, order)),
            RowInput::Tokens(tokens) => {
                self.tokens.clear();
                self.tokens.extend(order.iter().map(|row| tokens[*row].0));
                (self.tokens.as_mut_ptr(), std::ptr::null_mut())
            }
        };
        sys::llama_batch {
            n_tokens: i32::try_from(order.len()).unwrap_or(i32::MAX),
            token,
            embd,
            pos: self.positions.as_mut_ptr(),
            n_seq_id: self.n_seq_id.as_mut_ptr(),
            seq_id: self.seq_ids.as_mut_ptr(),
            logits: self.outputs.as_mut_ptr(),
        }
    }

    fn fill_positions(&mut self, rows: &Rows<'_>, order: &[usize]) {
        self.positions.clear();
        // Section after section: with M-RoPE text has the same position in the first three, and 0 in the fourth
        // (llama-batch.cpp, `llama_batch_allocr::init`).
        for section in 0..self.positions_per_row {
            let position = |row: &usize| if section < 3 { rows.positions[*row] as sys::llama_pos } else { 0 };
            self.positions.extend(order.iter().map(position));
        }
    }

    /// Rows that already lie in order are passed where they are: llama.cpp only reads them (llama-batch.cpp,
    /// `llama_batch_compat::init`).
    fn embd_of(&mut self, hidden: &[f32], order: &[usize]) -> *mut f32 {
        let width = self.n_embd;
        let first = order[0];
        if order.iter().enumerate().all(|(place, row)| *row == first + place) {
            return hidden[first * width..].as_ptr().cast_mut();
        }
        self.embd.clear();
        order.iter().for_each(|row| self.embd.extend_from_slice(&hidden[row * width..(row + 1) * width]));
        self.embd.as_mut_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_has_three_equal_positions_and_a_zero_with_m_rope() {
        let rows = Rows {
            input: RowInput::Hidden(&[1.0, 2.0]),
            slots: &[3, 1],
            positions: &[7, 8],
            outputs: &[true, false],
        };
        let mut arrays = BatchArrays::new(1, 4);
        arrays.fill(&rows, &[1, 0], Marks::AsGiven);
        assert_eq!(arrays.positions, [8, 7, 8, 7, 8, 7, 0, 0]);
        assert_eq!(arrays.embd, [2.0, 1.0]);
        assert_eq!(arrays.seq_id, [1, 3]);
        assert_eq!(arrays.outputs, [0, 1]);
    }

    #[test]
    fn rows_in_order_are_not_copied() {
        let hidden = [1.0, 2.0, 3.0];
        let rows =
            Rows { input: RowInput::Hidden(&hidden), slots: &[0, 0, 1], positions: &[0, 1, 0], outputs: &[] };
        let mut arrays = BatchArrays::new(1, 1);
        let batch = arrays.fill(&rows, &[1, 2], Marks::All);
        assert_eq!(batch.embd.cast_const(), hidden[1..].as_ptr());
        assert_eq!(arrays.outputs, [1, 1]);
    }
}
