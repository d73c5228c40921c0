//! Errors of the elementary functions on a stride of all inputs and on the hard cases.

#[allow(dead_code, unreachable_pub)]
#[path = "common/reference.rs"]
mod reference;

use castiron_num::math;
use reference::{FUNCTIONS, Worst, check};
use std::f32::consts::{FRAC_PI_2, FRAC_PI_4, PI};

/// About 2.1 million inputs; odd, so every exponent and sign is met with changing fractions.
const STRIDE: usize = 2039;

#[test]
fn errors_stay_below_the_stated_bounds() {
    for function in &FUNCTIONS {
        let mut worst = Worst::default();
        for bits in (0..=u32::MAX).step_by(STRIDE) {
            check(function, f32::from_bits(bits), &mut worst).expect("a special value");
        }
        println!("{}: {:.4} ulp at {:e}", function.name, worst.ulp, worst.input);
        assert!(worst.ulp <= function.bound, "{}: {} ulp at {:e}", function.name, worst.ulp, worst.input);
    }
}

#[test]
fn hard_cases() {
    let edges = [0.0f32, 1.0, 0.5, 2.0, 20.0, 0.414_213_6, 0.292_893_2, 0.346_573_6, FRAC_PI_4, FRAC_PI_2];
    let far = [PI, 16_367_173.0, 88.722_83, 88.722_84, 87.336_54, 87.336_55, 103.97, 17.33, 1e-30, 1e30];
    let named =
        [f32::INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), f32::from_bits(0x7F_FFFF)];
    // The f32 nearest to multiples of pi / 2 (by continued fractions); the first is 16367173 * 2^72.
    let near_pi = [0x6F79_BE45, 0x50A3_E87F, 0x437C_E5F1, 0x6A19_76F1, 0x53B1_46A6].map(f32::from_bits);
    for x in edges.into_iter().chain(far).chain(named).chain(near_pi) {
        for x in [x, x.next_up(), x.next_down(), -x, -x.next_up(), -x.next_down()] {
            for function in &FUNCTIONS {
                let mut worst = Worst::default();
                check(function, x, &mut worst).expect("a special value");
                assert!(worst.ulp <= function.bound, "{}({x:e}): {} ulp", function.name, worst.ulp);
            }
        }
    }
}

#[test]
fn exact_points_and_signs() {
    let bits = |v: f32| v.to_bits();
    assert_eq!(bits(math::exp(0.0)), bits(1.0));
    assert_eq!(bits(math::exp(-0.0)), bits(1.0));
    assert_eq!(bits(math::exp(-87.5)), 0);
    assert_eq!(bits(math::ln(1.0)), 0);
    assert_eq!(bits(math::ln_1p(-0.0)), bits(-0.0));
    assert_eq!((math::ln(-0.0), math::ln(0.0)), (f32::NEG_INFINITY, f32::NEG_INFINITY));
    assert_eq!(bits(math::sigmoid(0.0)), bits(0.5));
    assert_eq!((math::sigmoid(f32::INFINITY), math::sigmoid(f32::NEG_INFINITY)), (1.0, 0.0));
    assert_eq!((bits(math::silu(0.0)), bits(math::silu(-0.0))), (0, bits(-0.0)));
    assert_eq!(math::softplus(20.5), 20.5);
    assert_eq!(math::softplus(f32::INFINITY), f32::INFINITY);
    assert_eq!(
        (bits(math::sin(-0.0)), bits(math::sin(0.0)), bits(math::cos(-0.0))),
        (bits(-0.0), 0, bits(1.0))
    );
}

#[test]
fn sin_cos_is_sin_and_cos() {
    for bits in (0..=u32::MAX).step_by(400_009) {
        let x = f32::from_bits(bits);
        let (s, c) = math::sin_cos(x);
        assert_eq!((s.to_bits(), c.to_bits()), (math::sin(x).to_bits(), math::cos(x).to_bits()));
    }
}

#[test]
fn exp_never_falls_near_its_joints() {
    // Where the multiple of ln 2 changes, neighbours must not step down.
    for k in -125..128 {
        let joint = ((f64::from(k) + 0.5) * std::f64::consts::LN_2) as f32;
        let mut x = (0..200).fold(joint, |x, _| x.next_down());
        for _ in 0..400 {
            assert!(math::exp(x) <= math::exp(x.next_up()), "{x:e}");
            x = x.next_up();
        }
    }
}

#[test]
fn rope_tables_are_correctly_rounded() {
    for theta in [10_000.0, 1e6, 1e7, 5e6, 500_000.0, 150.0] {
        for rot in [2, 8, 16, 32, 64, 128, 256, 96, 7] {
            let table = math::inv_freq(theta, rot);
            assert_eq!(table.len(), rot / 2);
            for (i, &v) in table.iter().enumerate() {
                let exact = theta.powf(-2.0 * i as f64 / rot as f64);
                assert_eq!(v.to_bits(), (exact as f32).to_bits(), "theta {theta}, rot {rot}, i {i}");
            }
        }
    }
}
