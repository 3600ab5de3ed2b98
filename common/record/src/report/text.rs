//! Numbers and names as people read them.

/// `text` as HTML text or attribute value.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A number of a chart to six significant digits: finer than a screen, and half the page's size.
pub(crate) fn rounded(x: f64) -> f64 {
    format!("{x:.5e}").parse().unwrap_or(x)
}

/// Four significant digits at most, thousands apart: `0.03127`, `12.3`, `48 210`.
pub(crate) fn number(x: f64) -> String {
    if !x.is_finite() {
        return "not a number".into();
    }
    let places = match x.abs() {
        a if a == 0.0 || a >= 1000.0 => 0,
        a if a < 1e-4 => return format!("{x:.2e}"),
        a => (3 - a.log10().floor() as i32).clamp(0, 7) as usize,
    };
    let fixed = format!("{x:.places$}");
    let fixed = if places > 0 { fixed.trim_end_matches('0').trim_end_matches('.') } else { &fixed };
    match fixed.split_once('.') {
        Some((whole, part)) => format!("{}.{part}", grouped(whole)),
        None => grouped(fixed),
    }
}

/// Four significant digits always, so that measurements beside each other have the same look: `0.1700`.
pub(crate) fn measured(x: f64) -> String {
    match x.abs() {
        a if (1e-4..1000.0).contains(&a) => {
            format!("{x:.0$}", (3 - a.log10().floor() as i32).max(0) as usize)
        }
        _ => number(x),
    }
}

/// A whole number, thousands apart by a space that does not break.
pub(crate) fn count(n: u64) -> String {
    grouped(&n.to_string())
}

fn grouped(digits: &str) -> String {
    let (sign, digits) = digits.strip_prefix('-').map_or(("", digits), |d| ("-", d));
    if digits.len() <= 4 {
        return format!("{sign}{digits}");
    }
    let mut out = String::from(sign);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push('\u{a0}');
        }
        out.push(c);
    }
    out
}

/// `0.42 s`, `83.1 s`, `12 min 5 s`, `3 h 20 min`.
pub(crate) fn seconds(s: f64) -> String {
    match s {
        s if !s.is_finite() || s < 0.095 => format!("{} s", number(s)),
        s if s < 9.95 => format!("{s:.2} s"),
        s if s < 119.95 => format!("{s:.1} s"),
        s if s < 7199.5 => format!("{} min {} s", s.round() as u64 / 60, s.round() as u64 % 60),
        s => format!("{} h {} min", (s / 60.0).round() as u64 / 60, (s / 60.0).round() as u64 % 60),
    }
}

/// A share as `97.0 %`, with a space that does not break.
pub(crate) fn percent(share: f64) -> String {
    if share.is_finite() { format!("{:.1}\u{a0}%", share * 100.0) } else { "not a number".into() }
}

/// `512 B`, `1.5 MiB`.
pub(crate) fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut x, mut unit) = (n as f64, 0);
    while x >= 1000.0 && unit + 1 < units.len() {
        x /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{n} B"),
        _ if x < 9.95 => format!("{x:.2} {}", units[unit]),
        _ => format!("{x:.1} {}", units[unit]),
    }
}

/// Unix time as `2026-11-21 09:23 UTC` (days to date after Howard Hinnant's `civil_from_days`).
pub(crate) fn moment(wall: f64) -> String {
    let minutes = (wall / 60.0).floor() as i64;
    let z = minutes.div_euclid(1440) + 719_468;
    let (era, day_of_era) = (z.div_euclid(146_097), z.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let mp = (5 * day_of_year + 2) / 153;
    let (day, month) = (day_of_year - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute) = (minutes.rem_euclid(1440) / 60, minutes.rem_euclid(60));
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        let shown = [0.0, 0.031_271, 0.5, 12.3, 999.96, 48_210.4, 1_234_567.0, 1e-6, f64::NAN].map(number);
        let wanted = [
            "0",
            "0.03127",
            "0.5",
            "12.3",
            "1000",
            "48\u{a0}210",
            "1\u{a0}234\u{a0}567",
            "1.00e-6",
            "not a number",
        ];
        assert_eq!(shown, wanted);
        assert_eq!(
            [0.0, 0.42, 83.12, 725.4, 12_000.0].map(seconds),
            ["0 s", "0.42 s", "83.1 s", "12 min 5 s", "3 h 20 min"]
        );
        assert_eq!([512, 1536, 5 << 30, 1 << 20].map(bytes), ["512 B", "1.50 KiB", "5.00 GiB", "1.00 MiB"]);
        assert_eq!([0.17, 12.0, 0.0, 4816.2].map(measured), ["0.1700", "12.00", "0", "4816"]);
        assert_eq!(moment(1_795_253_039.5), "2026-11-21 09:23 UTC");
        assert_eq!(moment(951_782_400.0), "2000-02-29 00:00 UTC");
    }
}
