//! The instruction set a form runs on.

/// An instruction set known to be present. Results never depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(pub(crate) Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Set {
    /// The scalar text of the law, nothing packed.
    Law,
    /// Packed forms without any instruction set beyond the target's baseline.
    #[cfg_attr(target_arch = "x86_64", allow(dead_code, reason = "a test and other targets use it"))]
    Portable,
    /// Packed forms with AVX2 and FMA. Made only by `present`, after both were found.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Packed forms with AVX-512F, AVX2 and FMA. Made only by `present`, after all were found.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The plain scalar form that reads like the law: the oracle.
    pub fn law() -> Self {
        Self(Set::Law)
    }

    /// The packed form in baseline instructions.
    pub fn portable() -> Self {
        Self(Set::Portable)
    }

    /// The widest form this processor has.
    pub fn detect() -> Self {
        Self::present().pop().unwrap_or(Self::portable())
    }

    /// Every level this processor has, from the law to the widest.
    pub fn present() -> Vec<Self> {
        #[allow(unused_mut, reason = "other targets have no more")]
        let mut all = vec![Self::law(), Self::portable()];
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            all.push(Self(Set::Avx2));
            if std::arch::is_x86_feature_detected!("avx512f") {
                all.push(Self(Set::Avx512));
            }
        }
        all
    }

    /// Whether the plain scalar product is asked for.
    pub(crate) fn is_law(self) -> bool {
        self.0 == Set::Law
    }

    /// A short name for receipts: `law`, `portable`, `avx2` or `avx512`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Set::Law => "law",
            Set::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
        }
    }
}

/// Makes one function that runs `$body` compiled for the level's instruction set.
///
/// The body is inlined into a copy with the target features on, so both copies are one text.
macro_rules! for_level {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:path;) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, reason = "kernel operands")]
        $vis fn $name(level: $crate::Level, $($arg: $ty),*) $(-> $ret)? {
            match level.0 {
                #[cfg(target_arch = "x86_64")]
                // The bodies are left to the compiler at 8 lanes on AVX-512 machines too.
                $crate::level::Set::Avx2 | $crate::level::Set::Avx512 => {
                    #[target_feature(enable = "avx2,fma")]
                    #[allow(clippy::too_many_arguments, reason = "kernel operands")]
                    fn wide($($arg: $ty),*) $(-> $ret)? {
                        $body($($arg),*)
                    }
                    // SAFETY: these levels are only made by `Level::present`, which found AVX2 and FMA here.
                    unsafe { wide($($arg),*) }
                }
                _ => $body($($arg),*),
            }
        }
    };
}
pub(crate) use for_level;
