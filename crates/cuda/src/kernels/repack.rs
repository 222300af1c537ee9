//! Weights into blocks; see `repack.cu`.

use lily_backend::Result;
use lily_model::Bits;

use super::{Kernels, Pass, arguments};
use crate::device::Pointer;

/// Rows of a matrix in device memory, as the file has them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) codes: Pointer,
    pub(crate) scales: Pointer,
    pub(crate) biases: Pointer,
}

impl Kernels {
    /// Reads `bytes` bytes and does nothing with them; `never` is not written.
    pub(crate) fn plain_read(&self, pass: &Pass<'_>, from: Pointer, bytes: usize, never: Pointer) -> Result<()> {
        let (grid, pieces) = (4 * pass.device.processors as usize, (bytes / 16) as u64);
        pass.launch(self.plain_read, (grid, 1), 512, arguments![from, pieces, never])
    }

    /// `tiles` tiles of a matrix, or of two that share tiles, of which `rows` rows each are there.
    pub(crate) fn repack(
        &self,
        pass: &Pass<'_>,
        bits: Bits,
        (first, second): (Source, Option<Source>),
        (rows, inputs, tiles): (usize, usize, usize),
        out: Pointer,
    ) -> Result<()> {
        let kernel = match bits {
            Bits::Four => self.repack_q4,
            Bits::Eight => self.repack_q8,
        };
        let (paired, second) = (i32::from(second.is_some()), second.unwrap_or(first));
        let (rows, inputs, tiles) = (rows as i32, inputs as i32, tiles as i32);
        // A few CTAs per processor; each work-item goes on with a stride.
        let grid = (8 * pass.device.processors as usize, 1);
        pass.launch(kernel, grid, 256, arguments![first, second, paired, rows, inputs, tiles, out])
    }
}
