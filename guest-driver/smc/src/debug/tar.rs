// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files as POSIX has them in an archive (ustar).

use std::io::{self, ErrorKind, Write};

/// Bytes of a block.
const BLOCK: usize = 512;

/// Appends a file.
///
/// # Errors
/// Those of `out`, or the name or the file is too long.
pub(super) fn append(
    out: &mut impl Write,
    name: &str,
    modified: u64,
    content: &[u8],
) -> io::Result<()> {
    out.write_all(&header(name, modified, content.len())?)?;
    out.write_all(content)?;
    let rest = content.len().next_multiple_of(BLOCK) - content.len();
    out.write_all(&vec![0; rest])
}

/// Ends the archive.
///
/// # Errors
/// Those of `out`.
pub(super) fn end(out: &mut impl Write) -> io::Result<()> {
    out.write_all(&[0; 2 * BLOCK])
}

fn header(name: &str, modified: u64, length: usize) -> io::Result<[u8; BLOCK]> {
    let mut header = [0; BLOCK];
    let mut put = |at: usize, room: usize, bytes: &[u8]| -> io::Result<()> {
        let place = header.get_mut(at..at + room).and_then(|place| place.get_mut(..bytes.len()));
        place.ok_or(ErrorKind::InvalidInput)?.copy_from_slice(bytes);
        Ok(())
    };
    put(0, 100, name.as_bytes())?;
    put(100, 7, b"0000600")?;
    put(108, 7, b"0000000")?;
    put(116, 7, b"0000000")?;
    put(124, 11, format!("{length:011o}").as_bytes())?;
    put(136, 11, format!("{modified:011o}").as_bytes())?;
    // The sum counts itself as spaces.
    put(148, 8, b"        ")?;
    put(156, 1, b"0")?;
    put(257, 8, b"ustar\x0000")?;
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    if let Some(place) = header.get_mut(148..156) {
        place.copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tar_reads_what_was_written() {
        let mut archive = Vec::new();
        append(&mut archive, "d/a.txt", 7, b"hello").unwrap();
        append(&mut archive, "d/empty", 7, b"").unwrap();
        append(&mut archive, "d/block", 7, &[b'x'; BLOCK]).unwrap();
        end(&mut archive).unwrap();
        assert_eq!(archive.len() % BLOCK, 0);
        let path = std::env::temp_dir().join(format!("smc-tar-{}", std::process::id()));
        std::fs::write(&path, archive).unwrap();
        let tar = |option: &str| {
            let output = std::process::Command::new("tar").arg(option).arg(&path).output().unwrap();
            assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!(tar("-tf"), "d/a.txt\nd/empty\nd/block\n");
        assert_eq!(tar("-xOf"), format!("hello{}", "x".repeat(BLOCK)));
        std::fs::remove_file(&path).unwrap();
        assert!(header(&"n".repeat(101), 0, 0).is_err());
    }
}
