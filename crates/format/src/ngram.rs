//! The hash of n-gram windows to table rows.
//!
//! For layer number j among the n-gram layers, `base = seed + 10007 * j`; multiplier i is
//! `2 * (splitmix64(base + G * (i + 1)) mod half) + 1` with `half = max(1, ((2^63 - 1) / vocab) / 2)` and G the splitmix
//! increment. With H heads a layer, head q has as modulus the prime number `H * j + q` counted from the first prime that is
//! at least `ngram_vocab_size_base`; heads own consecutive row ranges; the total is padded up to a multiple of the divisor.
//!
//! Order n (2..=N) mixes the newest n tokens: `m = (w0 * mult0) ^ (w1 * mult1) ^ ...`, row `m mod modulus + offset`, heads of
//! order 2 first. A window never reaches past an end-of-sequence token: once a previous token is eos, it and everything
//! older reads as eos. Before the first token of a sequence everything reads as eos.

use crate::{Config, Error, ErrorKind, Result};

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The row hash of one n-gram layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hash {
    multipliers: Vec<u64>,
    moduli: Vec<u64>,
    offsets: Vec<u64>,
    rows: u64,
    heads_per_ngram: usize,
    eos: u32,
}

impl Hash {
    /// Derives the hash of the n-gram layer number `index` (position in [`crate::PleConfig::layers`], not a layer number).
    ///
    /// An error when the configuration has no such layer.
    pub fn derive(config: &Config, index: usize) -> Result<Self> {
        let ple = config.ple.as_ref().filter(|p| index < p.layers.len()).ok_or_else(|| {
            Error::new(ErrorKind::Config, format!("config.json: ple_layer_ids has no entry number {index}"))
        })?;
        let half = (((1u64 << 63) - 1) / (config.vocab_size as u64).max(1) / 2).max(1);
        let base = ple.seed.wrapping_add(10007 * index as u64);
        let multipliers = (1..=ple.ngram_size as u64)
            .map(|i| 2 * (splitmix64(base.wrapping_add(GAMMA.wrapping_mul(i))) % half) + 1)
            .collect();
        let heads = ple.heads();
        let moduli: Vec<u64> = primes_from(ple.vocab_base).skip(heads * index).take(heads).collect();
        let mut total = 0;
        let offsets = moduli
            .iter()
            .map(|&prime| {
                let at = total;
                total += prime;
                at
            })
            .collect();
        let rows = total.next_multiple_of(ple.divisor.max(1));
        Ok(Self {
            multipliers,
            moduli,
            offsets,
            rows,
            heads_per_ngram: ple.heads_per_ngram,
            eos: config.ngram_eos(),
        })
    }

    /// Odd multipliers of the window tokens, newest first: `ngram_size` of them.
    pub fn multipliers(&self) -> &[u64] {
        &self.multipliers
    }

    /// Prime modulus of each head.
    pub fn moduli(&self) -> &[u64] {
        &self.moduli
    }

    /// First row of each head.
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// Rows a token uses: `heads_per_ngram * (ngram_size - 1)`.
    pub fn heads(&self) -> usize {
        self.moduli.len()
    }

    /// Previous tokens that a window reads: `ngram_size - 1`.
    pub fn history(&self) -> usize {
        self.multipliers.len() - 1
    }

    /// Rows of the table, padding included.
    pub fn total_rows(&self) -> u64 {
        self.rows
    }

    /// The token that ends a window.
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// Row ids of token `id` after the tokens `prev`, in head order into `out`.
    ///
    /// `prev` is oldest first, newest last; only its last [`Self::history`] tokens matter and a shorter one is preceded by
    /// eos. Ids below the vocabulary size never overflow; any other id still gives rows inside the table.
    ///
    /// # Panics
    /// When `out` does not hold exactly [`Self::heads`] ids.
    pub fn rows(&self, prev: &[u32], id: u32, out: &mut [u64]) {
        assert_eq!(out.len(), self.heads(), "a token has {} rows", self.heads());
        let mut mix = u64::from(id).wrapping_mul(self.multipliers[0]);
        let mut older = prev.iter().rev();
        let mut ended = false;
        let orders = self.multipliers[1..].iter().zip(out.chunks_exact_mut(self.heads_per_ngram)).enumerate();
        for (order, (&multiplier, rows)) in orders {
            let token = older.next().copied().filter(|&t| !ended && t != self.eos);
            ended |= token.is_none();
            mix ^= u64::from(token.unwrap_or(self.eos)).wrapping_mul(multiplier);
            let first = order * self.heads_per_ngram;
            for (q, row) in rows.iter_mut().enumerate() {
                *row = mix % self.moduli[first + q] + self.offsets[first + q];
            }
        }
    }

    /// The rows of every token of `ids` in turn, with the history `prev` before them: `ids.len() * heads` row ids.
    pub fn rows_of(&self, prev: &[u32], ids: &[u32]) -> Vec<u64> {
        let mut all = prev.to_vec();
        let mut out = vec![0; ids.len() * self.heads()];
        for (&id, rows) in ids.iter().zip(out.chunks_exact_mut(self.heads())) {
            self.rows(&all, id, rows);
            all.push(id);
        }
        out
    }

    /// Checks a stored I64 buffer against a derived one; `name` is the tensor.
    pub(crate) fn check(name: &str, stored: &[u8], derived: &[u64]) -> Result<()> {
        let values = stored.chunks_exact(8).map(|c| c.try_into().map_or(0, i64::from_le_bytes));
        for (i, (have, &want)) in values.zip(derived).enumerate() {
            if u64::try_from(have) != Ok(want) {
                return Err(Error::new(
                    ErrorKind::BadValue,
                    format!(
                        "tensor {name}: element {i} is {have} but the configuration implies {want}; seed, vocab_size, \
                         ngram_size, heads_per_ngram, ngram_vocab_size_base or ple_layer_ids do not belong to these weights"
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// The splitmix64 step: advances by the increment, then mixes.
fn splitmix64(value: u64) -> u64 {
    let mut v = value.wrapping_add(GAMMA);
    v = (v ^ (v >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    v = (v ^ (v >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    v ^ (v >> 31)
}

/// The primes that are at least `start`, rising.
fn primes_from(start: u64) -> impl Iterator<Item = u64> {
    (start..).filter(|&n| is_prime(n))
}

/// Miller-Rabin with the first twelve primes as bases: exact for every u64.
fn is_prime(n: u64) -> bool {
    const BASES: [u64; 12] = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37];
    if n < 2 {
        return false;
    }
    if let Some(&p) = BASES.iter().find(|&&p| n.is_multiple_of(p)) {
        return n == p;
    }
    let twos = (n - 1).trailing_zeros();
    let odd = (n - 1) >> twos;
    BASES.iter().all(|&base| {
        let mut x = power(base, odd, n);
        if x == 1 || x == n - 1 {
            return true;
        }
        (1..twos).any(|_| {
            x = multiply(x, x, n);
            x == n - 1
        })
    })
}

fn multiply(a: u64, b: u64, modulus: u64) -> u64 {
    (u128::from(a) * u128::from(b) % u128::from(modulus)) as u64
}

fn power(mut base: u64, mut exponent: u64, modulus: u64) -> u64 {
    let mut out = 1;
    while exponent > 0 {
        if exponent & 1 == 1 {
            out = multiply(out, base, modulus);
        }
        base = multiply(base, base, modulus);
        exponent >>= 1;
    }
    out
}
