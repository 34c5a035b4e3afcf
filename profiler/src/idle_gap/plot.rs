//! The experiment as an SVG drawing, after the paper's figure 9: ΔL over the gap, a line of medians and a band of quartiles
//! for each cut.

use chart::{Chart, Curve};

use super::Point;

/// The drawing, a whole SVG file. `points` of one cut lie together, their gaps rising, as
/// [`Experiment::run`](super::Experiment::run) gives them.
pub fn svg(points: &[Point], title: &str) -> String {
    let at = |point: &Point| chart::Point {
        x: point.actual_gap.0,
        y: point.extra.median,
        band: Some((point.extra.lower, point.extra.upper)),
    };
    let curve = |points: &[Point]| Curve {
        name: format!("cut {}", points.first().map_or(0, |point| point.cut)),
        points: points.iter().map(at).collect(),
    };
    chart::svg(&[Chart {
        title: title.to_owned(),
        x: "gap before each call (ms)".to_owned(),
        y: "extra time per token (ms)".to_owned(),
        curves: points.chunk_by(|a, b| a.cut == b.cut).map(curve).collect(),
    }])
}

#[cfg(test)]
mod tests {
    use cluster::Millis;
    use roxmltree::Document;

    use super::*;
    use crate::statistics::Quartiles;

    fn point(cut: u32, gap: f64, extra: f64) -> Point {
        let extra = Quartiles { lower: extra - 0.1, median: extra, upper: extra + 0.2 };
        Point { cut, gap: Millis(gap), actual_gap: Millis(gap), per_token: extra, extra }
    }

    #[test]
    fn each_cut_has_a_line_and_a_band() {
        let points = [point(5, 0.0, 0.0), point(5, 25.0, 2.5), point(15, 0.0, -0.3), point(15, 25.0, 1.0)];
        let drawing = svg(&points, "gaps");
        let document = Document::parse(&drawing).unwrap();
        let count = |name| document.descendants().filter(|node| node.tag_name().name() == name).count();
        assert_eq!((count("polyline"), count("polygon")), (2, 2));
        let texts: Vec<&str> = document.descendants().filter_map(|node| node.text()).collect();
        assert!(texts.contains(&"cut 5") && texts.contains(&"cut 15"), "{texts:?}");
    }
}
