//! Random numbers by place: no state, so any part of a tensor can be made alone.

use castiron_num::philox::philox4x32_10;

/// The words of one logical matrix: word i is word i mod 4 of Philox4x32-10 with the seed as key and the counter
/// `(i / 4, low and high, first 64 bits of blake3 of the name, low and high)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream {
    key: [u32; 2],
    id: [u32; 2],
}

impl Stream {
    pub(crate) fn new(seed: u64, name: &str) -> Self {
        let hash = blake3::hash(name.as_bytes());
        let [a, b, c, d, e, f, g, h, ..] = *hash.as_bytes();
        Self {
            key: [seed as u32, (seed >> 32) as u32],
            id: [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])],
        }
    }

    fn block(&self, block: u64) -> [u32; 4] {
        philox4x32_10([block as u32, (block >> 32) as u32, self.id[0], self.id[1]], self.key)
    }

    /// Word `i`.
    pub(crate) fn word(&self, i: u64) -> u32 {
        self.block(i / 4)[(i % 4) as usize]
    }

    /// Words `from..from + count`, in order, to `each`.
    pub(crate) fn words(&self, from: u64, count: u64, mut each: impl FnMut(u32)) {
        let end = from + count;
        let mut at = from;
        while at < end {
            let words = self.block(at / 4);
            let (first, last) = (at % 4, (end - at / 4 * 4).min(4));
            words[first as usize..last as usize].iter().for_each(|&w| each(w));
            at = at / 4 * 4 + last;
        }
    }
}

/// How a word becomes a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Law {
    /// `mean + n * step`, n the sum of the four bytes less 510: a bell within 3.45 standard deviations.
    Bell { mean: f32, step: f32 },
    /// `low + width * u`, u the upper 24 bits as a fraction.
    Flat { low: f32, width: f32 },
}

/// The standard deviation of the sum of four random bytes, `sqrt(4 * (256^2 - 1) / 12)`.
const BYTES_DEVIATION: f32 = 147.800_54;

impl Law {
    /// A bell of the given mean and standard deviation.
    pub(crate) fn bell(mean: f32, deviation: f32) -> Self {
        Self::Bell { mean, step: deviation / BYTES_DEVIATION }
    }

    #[inline]
    pub(crate) fn value(self, word: u32) -> f32 {
        match self {
            Self::Bell { mean, step } => {
                let sum: i32 = word.to_le_bytes().iter().map(|&b| i32::from(b)).sum();
                mean + (sum - 510) as f32 * step
            }
            Self::Flat { low, width } => low + width * ((word >> 8) as f32 / 16_777_216.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_stream_are_the_stream() {
        let stream = Stream::new(7, "layers.0.x");
        let mut all = Vec::new();
        stream.words(0, 50, |w| all.push(w));
        assert!((0..50).all(|i| all[i as usize] == stream.word(i)));
        for from in 0..12 {
            for count in 0..12 {
                let mut part = Vec::new();
                stream.words(from, count, |w| part.push(w));
                assert_eq!(part, all[from as usize..(from + count) as usize]);
            }
        }
        assert_ne!(stream.word(0), Stream::new(8, "layers.0.x").word(0));
        assert_ne!(stream.word(0), Stream::new(7, "layers.0.y").word(0));
    }

    #[test]
    fn the_bell_has_its_mean_and_deviation() {
        let (stream, law) = (Stream::new(1, "bell"), Law::bell(0.25, 0.02));
        let mut values = Vec::new();
        stream.words(0, 100_000, |w| values.push(f64::from(law.value(w))));
        let mean = values.iter().sum::<f64>() / 1e5;
        let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / 1e5).sqrt();
        assert!((mean - 0.25).abs() < 3e-4, "{mean}");
        assert!((deviation - 0.02).abs() < 3e-4, "{deviation}");
        let flat = Law::Flat { low: -1.0, width: 3.0 };
        assert!(flat.value(0) == -1.0 && flat.value(u32::MAX) < 2.0);
    }
}
