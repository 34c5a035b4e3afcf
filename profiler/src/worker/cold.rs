//! Empties the processor's caches of what a run left there.
//!
//! In a whole model, every block's weights come from memory: by the time a block is run again, all the others have passed
//! through the caches. A reduced model would find its few weights still there, so a buffer is streamed in between. Each thread
//! streams its own part, for a core's own cache is not emptied by other cores.

use std::hint::black_box;
use std::thread;

/// Bytes of a cache line, or less.
const LINE: usize = 64;

/// A buffer to stream.
pub(super) struct Cold {
    parts: Vec<Vec<u64>>,
}

impl Cold {
    /// `bytes` in all, for so many threads.
    pub(super) fn new(bytes: u64, threads: u32) -> Self {
        let words = (bytes / u64::from(threads.max(1)) / 8) as usize;
        // Ones: pages of zeros might all be one page.
        Self { parts: (0..threads).map(|_| vec![1; words]).collect() }
    }

    /// Streams it.
    pub(super) fn stream(&self) {
        match self.parts.as_slice() {
            [] => {}
            [only] => read(only),
            [own, others @ ..] => thread::scope(|scope| {
                for part in others {
                    scope.spawn(|| read(part));
                }
                read(own);
            }),
        }
    }
}

fn read(part: &[u64]) {
    let sum = part.iter().step_by(LINE / 8).fold(0_u64, |sum, word| sum.wrapping_add(*word));
    black_box(sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_is_shared_out_over_the_threads() {
        let cold = Cold::new(1 << 20, 2);
        assert_eq!(cold.parts.iter().map(|part| part.len() * 8).collect::<Vec<_>>(), [1 << 19, 1 << 19]);
        cold.stream();
        Cold::new(0, 3).stream();
    }
}
