//! Where the time goes, by kind of operation, for the benchmark harness.

use std::sync::Mutex;

use castiron_cpu::peak;

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Products with weights outside the routed experts.
    Dense,
    /// Routed and shared experts, their activations included.
    Experts,
    /// The GDN recurrence.
    Recurrence,
    /// Block selection and attention.
    Attention,
}

impl Kind {
    /// All kinds, in the order of [`Profile::totals`].
    pub const ALL: [Kind; 4] = [Kind::Dense, Kind::Experts, Kind::Recurrence, Kind::Attention];

    /// A name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Dense => "dense products",
            Kind::Experts => "experts",
            Kind::Recurrence => "recurrence",
            Kind::Attention => "attention",
        }
    }
}

/// Time, operations and weight bytes of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Total {
    /// Seconds on [`peak::clock`].
    pub seconds: f64,
    /// Multiplications and additions.
    pub operations: f64,
    /// Stored weight bytes, each call counted once.
    pub bytes: f64,
}

/// Totals since the profile was made or last taken.
#[derive(Debug, Default)]
pub struct Profile {
    totals: Mutex<[Total; 4]>,
}

impl Profile {
    /// Runs `job` and adds it to `kind`.
    pub(crate) fn time<T>(
        &self,
        kind: Kind,
        threads: usize,
        operations: f64,
        bytes: f64,
        job: impl FnOnce() -> T,
    ) -> T {
        let start = peak::clock(threads);
        let done = job();
        let seconds = peak::clock(threads) - start;
        let mut totals = self.totals.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let total = &mut totals[kind as usize];
        total.seconds += seconds;
        total.operations += operations;
        total.bytes += bytes;
        done
    }

    /// The totals in the order of [`Kind::ALL`]; they start again at zero.
    pub fn take(&self) -> [Total; 4] {
        std::mem::take(&mut *self.totals.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}
