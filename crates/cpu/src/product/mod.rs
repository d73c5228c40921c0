//! `y = W x` for a few or many rows, every output a `dot32`.
//!
//! One order, three shapes of loop. [`product_law`] is the definition. A single row streams the weights once,
//! in registers, where their storage allows it (`stream`). More rows share decoded tiles of weights (`tile`).
//! Both keep the 32 chains of the law; only what is computed side by side differs.

mod layout;
mod stream;
mod tile;

use castiron_num::dot::dot32;

use crate::pool::{Columns, Pool};
use crate::{Level, Matrix};

/// `y[r, n] = dot32(w_n, x_r)`, then the scale of the output or of the matrix where it has one.
///
/// `x` is `[rows, cols]`, `y` is `[rows, w.rows()]`. The bytes of a row of `y` depend on that row of `x`
/// alone: not on the other rows, the level or the number of threads.
pub fn product(level: Level, pool: &Pool, w: &Matrix, x: &[f32], y: &mut [f32]) {
    product_on(level, pool.for_work(x.len() * w.rows()), w, x, y);
}

/// [`product`] on all threads of `pool`, however small the job is.
fn product_on(level: Level, pool: &Pool, w: &Matrix, x: &[f32], y: &mut [f32]) {
    let rows = x.len() / w.cols();
    assert_eq!(x.len(), rows * w.cols(), "x is whole rows");
    assert_eq!(y.len(), rows * w.rows(), "y has a value for each row and output");
    if rows == 0 {
        return;
    }
    if level.is_law() {
        product_law(w, x, y);
    } else {
        let columns = Columns::new(y, w.rows());
        if rows == 1 && stream::can(level, w) {
            stream::product(level, pool, w, x, &columns);
        } else {
            tile::product(level, pool, w, x, rows, &columns);
        }
    }
    if let Some(scales) = w.row_scales() {
        for y in y.chunks_exact_mut(w.rows()) {
            y.iter_mut().zip(scales).for_each(|(y, s)| *y *= s);
        }
    }
    let scale = w.output_scale();
    if scale != 1.0 {
        y.iter_mut().for_each(|y| *y *= scale);
    }
}

/// The definition.
fn product_law(w: &Matrix, x: &[f32], y: &mut [f32]) {
    let mut row = vec![0.0; w.cols()];
    for n in 0..w.rows() {
        w.decode_row(n, &mut row);
        for (x, y) in x.chunks_exact(w.cols()).zip(y.chunks_exact_mut(w.rows())) {
            y[n] = dot32(&row, x);
        }
    }
}

#[cfg(test)]
mod tests;
