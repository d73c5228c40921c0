//! `strftime_now`, without a time zone database: the clock is UTC or whatever offset the caller added.

/// Civil time, proleptic Gregorian.
struct Civil {
    year: i64,
    month: usize,
    day: i64,
    hour: i64,
    minute: i64,
    second: i64,
    /// 0 is Sunday.
    weekday: usize,
    /// 1 is the first of January.
    yearday: i64,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Splits seconds since 1970. Days to dates as in Hinnant's "chrono-compatible low-level date algorithms".
fn civil(seconds: i64) -> Civil {
    let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let doe = shifted.rem_euclid(146_097);
    let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = yoe + era * 400 + i64::from(month <= 2);
    let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    // `doy` counts from the first of March.
    let yearday = if month <= 2 { doy - 305 } else { doy + 60 + i64::from(leap) };
    Civil {
        year,
        month: month as usize,
        day: doy - (153 * mp + 2) / 5 + 1,
        hour: rest / 3_600,
        minute: rest / 60 % 60,
        second: rest % 60,
        weekday: (days + 4).rem_euclid(7) as usize,
        yearday,
    }
}

/// Formats a time (seconds since 1970) by the directives that chat templates use; an unknown directive is an error
/// that names it.
pub(super) fn strftime(seconds: i64, format: &str) -> Result<String, String> {
    // Years 0 to 9999, as Python's datetime.
    if !(-62_167_219_200..253_402_300_800).contains(&seconds) {
        return Err("the time is outside the years 0 to 9999".to_string());
    }
    let c = civil(seconds);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(ch) = chars.next() {
        if ch != '%' {
            out.push(ch);
            continue;
        }
        match chars.next() {
            // glibc: no padding.
            Some('-') => out.push_str(directive(&c, chars.next())?.trim_start_matches(['0', ' '])),
            d => out.push_str(&directive(&c, d)?),
        }
    }
    Ok(out)
}

fn directive(c: &Civil, directive: Option<char>) -> Result<String, String> {
    let (month, day) = (MONTHS[c.month - 1], DAYS[c.weekday]);
    let hour12 = (c.hour + 11) % 12 + 1;
    Ok(match directive {
        Some('Y') => format!("{:04}", c.year),
        Some('y') => format!("{:02}", c.year % 100),
        Some('m') => format!("{:02}", c.month),
        Some('d') => format!("{:02}", c.day),
        Some('e') => format!("{:2}", c.day),
        Some('H') => format!("{:02}", c.hour),
        Some('I') => format!("{hour12:02}"),
        Some('M') => format!("{:02}", c.minute),
        Some('S') => format!("{:02}", c.second),
        Some('j') => format!("{:03}", c.yearday),
        Some('p') => if c.hour < 12 { "AM" } else { "PM" }.to_string(),
        Some('B') => month.to_string(),
        Some('b' | 'h') => month[..3].to_string(),
        Some('A') => day.to_string(),
        Some('a') => day[..3].to_string(),
        Some('F') => format!("{:04}-{:02}-{:02}", c.year, c.month, c.day),
        Some('T') => format!("{:02}:{:02}:{:02}", c.hour, c.minute, c.second),
        Some('R') => format!("{:02}:{:02}", c.hour, c.minute),
        Some('Z') => "UTC".to_string(),
        Some('z') => "+0000".to_string(),
        Some('%') => "%".to_string(),
        Some(other) => return Err(format!("strftime_now: the directive %{other} is not supported")),
        None => return Err("strftime_now: the format ends with a lone %".to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn known_dates() {
        let all = "%Y-%m-%d %H:%M:%S %j %a %A %b %B %I %p %-d %y";
        let cases = [
            (0, "1970-01-01 00:00:00 001 Thu Thursday Jan January 12 AM 1 70"),
            (951_782_400, "2000-02-29 00:00:00 060 Tue Tuesday Feb February 12 AM 29 00"),
            (1_735_689_599, "2024-12-31 23:59:59 366 Tue Tuesday Dec December 11 PM 31 24"),
            (1_709_208_000, "2024-02-29 12:00:00 060 Thu Thursday Feb February 12 PM 29 24"),
            (1_772_323_199, "2026-02-28 23:59:59 059 Sat Saturday Feb February 11 PM 28 26"),
            (1_772_323_200, "2026-03-01 00:00:00 060 Sun Sunday Mar March 12 AM 1 26"),
            (-1, "1969-12-31 23:59:59 365 Wed Wednesday Dec December 11 PM 31 69"),
        ];
        for (seconds, text) in cases {
            assert_eq!(strftime(seconds, all).as_deref(), Ok(text));
        }
        assert!(strftime(0, "%Q").is_err() && strftime(0, "%").is_err());
        assert!(strftime(i64::MAX, "%Y").is_err() && strftime(i64::MIN, "%Y").is_err());
    }
}
