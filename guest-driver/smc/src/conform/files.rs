// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The output files of a report.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::ConformArgs;
use crate::error::CliError;
use crate::output;

/// Where one form of the report goes.
#[derive(Debug)]
enum Place {
    /// Standard output.
    Output,
    /// An open file.
    File(PathBuf, File),
}

impl Place {
    /// Opens a file, and keeps its contents: the report of the last run stays until the next
    /// report.
    fn open(path: &Path) -> Result<Place, CliError> {
        if path.as_os_str() == "-" {
            return Ok(Place::Output);
        }
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(CliError::io(format!("cannot write {}", path.display())))?;
        Ok(Place::File(path.to_owned(), file))
    }

    fn write(self, text: &str) -> Result<(), CliError> {
        let (path, mut file) = match self {
            Place::Output => return output::print(text),
            Place::File(path, file) => (path, file),
        };
        // A FIFO or a device has no length.
        let is_regular = file.metadata().is_ok_and(|data| data.is_file());
        let emptied = if is_regular { file.set_len(0) } else { Ok(()) };
        let written = emptied.and_then(|()| file.write_all(text.as_bytes()));
        written.map_err(CliError::io(format!("cannot write {}", path.display())))
    }
}

/// The outputs of a report, opened before any case is played, since a run takes long.
#[derive(Debug)]
pub(super) struct ReportFiles {
    json: Option<Place>,
    junit: Option<Place>,
    ktap: Option<Place>,
    html: Option<Place>,
}

impl ReportFiles {
    /// Opens the requested outputs.
    ///
    /// # Errors
    /// An output cannot be written.
    pub(super) fn open(args: &ConformArgs) -> Result<ReportFiles, CliError> {
        let open = |path: &Option<PathBuf>| path.as_deref().map(Place::open).transpose();
        Ok(ReportFiles {
            json: open(&args.json)?,
            junit: open(&args.junit)?,
            ktap: open(&args.ktap)?,
            html: open(&args.html)?,
        })
    }

    /// Writes the requested forms of a report, and prints the text unless another form is printed.
    ///
    /// # Errors
    /// A file cannot be written, or standard output is gone.
    pub(super) fn write(
        self,
        report: &smc_conform::Report<'_>,
        names_all: bool,
    ) -> Result<(), CliError> {
        let all = [&self.json, &self.junit, &self.ktap, &self.html];
        let is_printed = all.iter().any(|place| matches!(place, Some(Place::Output)));
        if let Some(place) = self.json {
            place.write(&report.json())?;
        }
        if let Some(place) = self.junit {
            place.write(&report.junit())?;
        }
        if let Some(place) = self.ktap {
            place.write(&report.ktap())?;
        }
        if let Some(place) = self.html {
            place.write(&report.html())?;
        }
        if is_printed { Ok(()) } else { output::print(&report.text(names_all)) }
    }
}
