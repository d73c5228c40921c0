//! Rows of a cache in pages that snapshots share.

use std::sync::Arc;

use castiron_exec::Activations;
use castiron_num::bf16;

/// Rows of a page.
const PAGE: usize = 64;

/// A growing list of rows of one width, in pages of 64, copied on write when a snapshot holds them too.
///
/// Rows are stored values: with bf16 activations they are kept in two bytes without loss.
#[derive(Clone)]
pub(crate) struct PagedRows {
    width: usize,
    len: usize,
    pages: Vec<Arc<Page>>,
    activations: Activations,
}

#[derive(Clone)]
enum Page {
    Bf16(Vec<u16>),
    F32(Vec<f32>),
}

impl PagedRows {
    pub(crate) fn new(width: usize, activations: Activations) -> Self {
        Self { width, len: 0, pages: Vec::new(), activations }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the pages that are held.
    pub(crate) fn bytes(&self) -> u64 {
        let page = |p: &Arc<Page>| match &**p {
            Page::Bf16(p) => std::mem::size_of_val(p.as_slice()) as u64,
            Page::F32(p) => std::mem::size_of_val(p.as_slice()) as u64,
        };
        self.pages.iter().map(page).sum()
    }

    /// Bytes of the pages that `rows` rows of `width` values of `element` bytes need.
    pub(crate) fn pages_bytes(rows: usize, width: usize, element: u64) -> u64 {
        (rows.div_ceil(PAGE) * PAGE * width) as u64 * element
    }

    /// Appends one stored row.
    pub(crate) fn push(&mut self, row: &[f32]) {
        debug_assert_eq!(row.len(), self.width);
        let at = self.len % PAGE * self.width;
        if at == 0 && self.len / PAGE == self.pages.len() {
            let size = PAGE * self.width;
            self.pages.push(Arc::new(match self.activations {
                Activations::Bf16 => Page::Bf16(vec![0; size]),
                Activations::F32 => Page::F32(vec![0.0; size]),
            }));
        }
        match Arc::make_mut(&mut self.pages[self.len / PAGE]) {
            Page::Bf16(page) => {
                for (p, &x) in page[at..at + self.width].iter_mut().zip(row) {
                    debug_assert!(x.is_nan() || bf16::round(x) == x, "{x} was not stored");
                    *p = bf16::to_bits(x);
                }
            }
            Page::F32(page) => page[at..at + self.width].copy_from_slice(row),
        }
        self.len += 1;
    }

    /// Drops the rows from `len` on.
    pub(crate) fn truncate(&mut self, len: usize) {
        if len < self.len {
            self.len = len;
            self.pages.truncate(len.div_ceil(PAGE));
        }
    }

    /// Appends `out.len()` values of row `row` from column `column` on to `out`.
    pub(crate) fn read(&self, row: usize, column: usize, count: usize, out: &mut Vec<f32>) {
        debug_assert!(row < self.len && column + count <= self.width);
        let at = row % PAGE * self.width + column;
        match &*self.pages[row / PAGE] {
            Page::Bf16(page) => out.extend(page[at..at + count].iter().map(|&x| bf16::from_bits(x))),
            Page::F32(page) => out.extend_from_slice(&page[at..at + count]),
        }
    }

    /// Rows `from..to`, whole.
    pub(crate) fn rows(&self, from: usize, to: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity((to - from) * self.width);
        (from..to).for_each(|row| self.read(row, 0, self.width, &mut out));
        out
    }

    /// Feeds the rows to a hasher, as little-endian f32.
    pub(crate) fn hash(&self, hasher: &mut blake3::Hasher) {
        let mut row = Vec::with_capacity(self.width);
        for i in 0..self.len {
            row.clear();
            self.read(i, 0, self.width, &mut row);
            crate::state::hash_floats(hasher, &row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_keeps_its_rows_when_the_original_is_cut_and_written_again() {
        for activations in [Activations::Bf16, Activations::F32] {
            let mut rows = PagedRows::new(2, activations);
            for i in 0..150 {
                rows.push(&[i as f32, -(i as f32)]);
            }
            let held = rows.clone();
            rows.truncate(70);
            for _ in 70..130 {
                rows.push(&[7.0, 8.0]);
            }
            assert_eq!(rows.rows(69, 71), [69.0, -69.0, 7.0, 8.0]);
            assert_eq!((rows.len(), held.len()), (130, 150));
            assert_eq!(held.rows(70, 71), [70.0, -70.0]);
            assert_eq!(held.rows(149, 150), [149.0, -149.0]);
            let mut tail = Vec::new();
            held.read(100, 1, 1, &mut tail);
            assert_eq!(tail, [-100.0]);
        }
    }
}
