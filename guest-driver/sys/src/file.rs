// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files named by a user.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a regular file to read, without waiting. A FIFO would wait for a writer, and a device may have no
/// end, or react to an open.
///
/// # Errors
/// The errors of open(2); EINVAL: not a regular file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"))
}

/// The text of a regular file of at most `limit` bytes. If the file grows meanwhile, the read bytes count.
///
/// # Errors
/// The errors of [`open_regular`] and read(2); the file is longer, or not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        let what = format!("it has more than {limit} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
    }
    String::from_utf8(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    #[test]
    fn what_is_no_short_regular_file_is_refused_at_once() {
        let place = smc_test_support::TestDir::new();
        let (file, fifo) = (place.join("file"), place.join("fifo"));
        std::fs::write(&file, "12345").unwrap();
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(read_text(&file, 5).unwrap(), "12345");
        let kind = |path: &Path, limit| read_text(path, limit).unwrap_err().kind();
        assert_eq!(kind(&file, 4), io::ErrorKind::FileTooLarge);
        std::fs::write(&file, [0xff]).unwrap();
        assert_eq!(kind(&file, 5), io::ErrorKind::InvalidData);
        for other in [&fifo, &*place, Path::new("/dev/zero"), Path::new("/dev/null")] {
            assert_eq!(kind(other, 5), io::ErrorKind::InvalidInput, "{}", other.display());
        }
        assert_eq!(kind(Path::new("/nowhere"), 5), io::ErrorKind::NotFound);
    }
}
