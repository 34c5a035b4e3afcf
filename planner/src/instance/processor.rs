//! One processor of a device, with every curve read at the points that the search asks for.

/// Tokens at which the prefill curve is tabulated; the simulator interpolates between them.
pub(crate) const PREFILL_GRID: [f64; 10] = [1., 8., 32., 64., 128., 256., 512., 1024., 2048., 4096.];

/// Depths of the cache at which what a prefill chunk costs on top is tabulated, beside none.
pub(crate) const DEPTH_GRID: [f64; 9] =
    [512., 1024., 2048., 4096., 8192., 16_384., 32_768., 65_536., 131_072.];

/// What a stage computes when it is visited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Visit {
    /// A decode step of so many rows.
    Decode(usize),
    /// All chunks of the mean prompt.
    Prompt,
    /// One chunk of as many tokens as this point of the grid has, with an empty cache.
    Chunk(usize),
}

/// Seconds of one visit on one processor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Costs<'a> {
    /// Of a block, by type.
    pub blocks: &'a [f64],
    /// Of being called at all.
    pub call: f64,
    /// Of norm and head.
    pub head: f64,
}

/// A curve by rows, read for every kind of visit.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct ByVisit {
    /// By rows, from 0.
    pub decode: Vec<f64>,
    pub prompt: f64,
    /// By point of [`PREFILL_GRID`].
    pub chunk: Vec<f64>,
}

impl ByVisit {
    pub(crate) fn at(&self, visit: Visit) -> f64 {
        match visit {
            Visit::Decode(rows) => self.decode[rows],
            Visit::Prompt => self.prompt,
            Visit::Chunk(point) => self.chunk[point],
        }
    }

    pub(crate) fn scaled(&self, factor: f64) -> Self {
        Self {
            decode: scaled(&self.decode, factor),
            prompt: self.prompt * factor,
            chunk: scaled(&self.chunk, factor),
        }
    }

    pub(crate) fn numbers(&self) -> impl Iterator<Item = f64> {
        self.decode.iter().chain(&self.chunk).copied().chain([self.prompt])
    }
}

/// One processor, tabulated.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Processor {
    /// Seconds of one decode step of a block: `[rows][type]`, rows from 0.
    pub decode: Vec<f64>,
    /// Seconds of one prefill chunk of a block: `[point of PREFILL_GRID][type]`.
    pub prefill_grid: Vec<f64>,
    /// Seconds of the mean prompt's chunks for a block, by type.
    pub prefill: Vec<f64>,
    /// Seconds that a prompt token costs on top of an empty cache: `[point of DEPTH_GRID][type]`; empty where depth
    /// does not matter.
    pub deeper: Vec<f64>,
    /// Seconds of norm and head, by rows.
    pub head: Vec<f64>,
    /// Seconds of a call; none where it was not measured apart.
    pub call: Option<ByVisit>,
    pub n_kinds: usize,
}

impl Processor {
    pub(crate) fn decode(&self, rows: usize) -> &[f64] {
        &self.decode[rows * self.n_kinds..][..self.n_kinds]
    }

    /// Seconds per token on top, at a point of [`DEPTH_GRID`], by type.
    pub(crate) fn deeper(&self, point: usize) -> Option<&[f64]> {
        self.deeper.get(point * self.n_kinds..(point + 1) * self.n_kinds)
    }

    pub(crate) fn costs(&self, visit: Visit) -> Costs<'_> {
        let blocks = match visit {
            Visit::Decode(rows) => self.decode(rows),
            Visit::Prompt => &self.prefill,
            Visit::Chunk(point) => &self.prefill_grid[point * self.n_kinds..][..self.n_kinds],
        };
        // A prompt needs the logits of its last token alone.
        let head = if let Visit::Decode(rows) = visit { self.head[rows] } else { self.head[1] };
        Costs { blocks, call: self.call.as_ref().map_or(0.0, |call| call.at(visit)), head }
    }

    /// The same processor, taking `factor` as long.
    pub(super) fn slowed(&self, factor: f64) -> Self {
        Self {
            decode: scaled(&self.decode, factor),
            prefill_grid: scaled(&self.prefill_grid, factor),
            prefill: scaled(&self.prefill, factor),
            deeper: scaled(&self.deeper, factor),
            head: scaled(&self.head, factor),
            call: self.call.as_ref().map(|call| call.scaled(factor)),
            n_kinds: self.n_kinds,
        }
    }

    /// Everything that makes it what it is.
    pub(super) fn numbers(&self) -> impl Iterator<Item = f64> {
        let tables = [&self.decode, &self.prefill_grid, &self.deeper, &self.head];
        tables.into_iter().flatten().copied().chain(self.call.iter().flat_map(ByVisit::numbers))
    }
}

fn scaled(of: &[f64], factor: f64) -> Vec<f64> {
    of.iter().map(|seconds| seconds * factor).collect()
}

/// Whole chunks of a prompt, and the tokens left over.
pub(crate) fn chunks(tokens: f64, chunk: f64) -> (f64, f64) {
    // Both are positive; `floor` is a call of a library.
    let full = (tokens / chunk) as u64 as f64;
    (full, tokens - full * chunk)
}

/// A value at `depth` from values at the points of [`DEPTH_GRID`], which is nothing at no depth.
pub(crate) fn at_depth(depth: f64, of: impl Fn(usize) -> f64) -> f64 {
    let above = DEPTH_GRID.partition_point(|&point| point < depth).min(DEPTH_GRID.len() - 1);
    let (low, below) = above.checked_sub(1).map_or((0.0, 0.0), |b| (DEPTH_GRID[b], of(b)));
    below + (of(above) - below) * (depth - low) / (DEPTH_GRID[above] - low)
}

/// A value for so many tokens from values at the points of [`PREFILL_GRID`].
pub(crate) fn at_tokens(tokens: f64, of: impl Fn(usize) -> f64) -> f64 {
    let above = PREFILL_GRID.partition_point(|&point| point < tokens).clamp(1, PREFILL_GRID.len() - 1);
    let (low, high) = (PREFILL_GRID[above - 1], PREFILL_GRID[above]);
    of(above - 1) + (of(above) - of(above - 1)) * (tokens - low) / (high - low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_depth_adds_is_linear_between_the_points_and_beyond_them() {
        let of = |point: usize| DEPTH_GRID[point] * 2.0;
        for depth in [0.0, 100.0, 512.0, 3000.0, 131_072.0, 200_000.0] {
            assert!((at_depth(depth, of) - depth * 2.0).abs() < 1e-6, "{depth}");
            assert!((at_tokens(depth, |point| PREFILL_GRID[point]) - depth).abs() < 1e-6, "{depth}");
        }
    }
}
