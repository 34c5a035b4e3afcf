//! Small systems of linear equations.

/// Solves `a · x = b` by elimination with pivots; none where the rows of `a` do not determine `x`.
pub(crate) fn solve(mut a: Vec<Vec<f64>>, mut b: Vec<f64>) -> Option<Vec<f64>> {
    let n = b.len();
    for column in 0..n {
        let pivot = (column..n).max_by(|i, j| a[*i][column].abs().total_cmp(&a[*j][column].abs()))?;
        if a[pivot][column].abs() < 1e-9 {
            return None;
        }
        a.swap(column, pivot);
        b.swap(column, pivot);
        let (above, below) = a.split_at_mut(column + 1);
        let pivot = &above[column];
        for (i, row) in below.iter_mut().enumerate() {
            let factor = row[column] / pivot[column];
            row.iter_mut().zip(pivot).for_each(|(entry, of_pivot)| *entry -= factor * of_pivot);
            b[column + 1 + i] -= factor * b[column];
        }
    }
    for row in (0..n).rev() {
        let known: f64 = (row + 1..n).map(|k| a[row][k] * b[k]).sum();
        b[row] = (b[row] - known) / a[row][row];
    }
    Some(b)
}

/// The `x` for which the rows of `a · x` are nearest to `b`, relative to the size of each.
pub(crate) fn least_squares(a: &[Vec<f64>], b: &[f64]) -> Option<Vec<f64>> {
    let n = a.first()?.len();
    let mut normal = vec![vec![0.0; n]; n];
    let mut right = vec![0.0; n];
    for (row, value) in a.iter().zip(b) {
        let weight = 1.0 / (value * value).max(1e-18);
        for i in 0..n {
            for j in 0..n {
                normal[i][j] += weight * row[i] * row[j];
            }
            right[i] += weight * row[i] * value;
        }
    }
    // The scale of the weights must not decide whether the system counts as singular.
    let scale = normal.iter().flatten().fold(0.0_f64, |most, entry| most.max(entry.abs())).max(1e-300);
    let scaled = normal.iter().map(|row| row.iter().map(|entry| entry / scale).collect()).collect();
    solve(scaled, right.iter().map(|entry| entry / scale).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_is_solved_or_found_to_have_no_one_solution() {
        let x = solve(vec![vec![0.0, 2.0], vec![1.0, 1.0]], vec![4.0, 3.0]).unwrap();
        assert_eq!(x, [1.0, 2.0]);
        assert_eq!(solve(vec![vec![1.0, 2.0], vec![2.0, 4.0]], vec![1.0, 2.0]), None);
    }

    #[test]
    fn least_squares_weighs_errors_by_size() {
        // 1 + n·2, measured with one outlier that is large in absolute terms only.
        let a: Vec<Vec<f64>> = [1.0, 2.0, 3.0, 40.0].iter().map(|n| vec![1.0, *n]).collect();
        let x = least_squares(&a, &[3.0, 5.0, 7.0, 81.5]).unwrap();
        assert!((x[0] - 1.0).abs() < 0.05 && (x[1] - 2.0).abs() < 0.05, "{x:?}");
    }
}
