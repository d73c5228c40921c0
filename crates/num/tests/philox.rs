//! Philox against the known answers published with Random123, and the noise against binary64.

use castiron_num::philox::{gumbel, philox4x32_10, uniform_neg_log};

#[test]
fn random123_known_answers() {
    let cases = [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ];
    for (counter, key, answer) in cases {
        assert_eq!(philox4x32_10(counter, key), answer);
    }
}

/// -ln((u + 0.5) * 2^-32) in binary64, from whichever end keeps the precision.
fn exponential(u: u32) -> f64 {
    let p = (f64::from(u) + 0.5) * 2f64.powi(-32);
    if u < 1 << 31 { -p.ln() } else { -(-((2f64.powi(32) - f64::from(u) - 0.5) * 2f64.powi(-32))).ln_1p() }
}

#[test]
fn noise_is_accurate_finite_and_falling() {
    let ends = [0, 1, 2, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, u32::MAX - 1, u32::MAX];
    let mut last = f32::INFINITY;
    let inputs = (0..=u32::MAX).step_by(40_009).chain(ends);
    for (i, u) in inputs.enumerate() {
        let (e, g) = (uniform_neg_log(u), gumbel(u));
        let (exact_e, exact_g) = (exponential(u), -exponential(u).ln());
        assert!(e > 0.0 && e.is_finite() && g.is_finite());
        assert!((f64::from(e) / exact_e - 1.0).abs() < 2.5 * 2f64.powi(-24), "{u}: {e} {exact_e}");
        assert!((f64::from(g) - exact_g).abs() < 3e-7 * exact_g.abs().max(1.0), "{u}: {g} {exact_g}");
        if i < 100_000 {
            assert!(e <= last, "{u}");
            last = e;
        }
    }
    assert!((gumbel(0) - -3.130).abs() < 1e-3 && (gumbel(u32::MAX) - 22.874).abs() < 1e-3);
}

#[test]
fn mean_of_the_gumbel_is_eulers_constant() {
    let n = 200_000u32;
    let draw = |i: u32| f64::from(gumbel(philox4x32_10([i, 3, 0, 0], [11, 13])[0]));
    let mean = (0..n).map(draw).sum::<f64>() / f64::from(n);
    assert!((mean - 0.577_215_66).abs() < 0.012, "{mean}");
}
