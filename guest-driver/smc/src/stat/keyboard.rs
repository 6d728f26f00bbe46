// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The terminal of the live view: each key arrives immediately, without echo.
//!
//! The former modes are restored however the process leaves the terminal: at the end of the view,
//! at a panic of a thread, at a signal ending the process, and while the process is stopped.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ism_sys::{lock, timespec};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::termios::{self, LocalModes, OptionalActions, Termios};
use signal_hook::consts::signal;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// Catchable signals with the default action of ending the process.
const ENDING: [i32; 14] = [
    signal::SIGHUP,
    signal::SIGINT,
    signal::SIGQUIT,
    signal::SIGTERM,
    signal::SIGABRT,
    signal::SIGALRM,
    signal::SIGPROF,
    signal::SIGSYS,
    signal::SIGTRAP,
    signal::SIGUSR1,
    signal::SIGUSR2,
    signal::SIGVTALRM,
    signal::SIGXCPU,
    signal::SIGXFSZ,
];

/// An event at the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    Key(u8),
    /// The page is not on the screen any more, or has another size.
    Redraw,
    /// The time is over.
    Nothing,
}

/// The terminal of this process.
pub(super) struct Keyboard {
    modes: Arc<Modes>,
    /// A byte for each [`Input::Redraw`].
    redraw: UnixStream,
}

impl Keyboard {
    /// `None`: there is no terminal for keys and for pages, or another process group owns the
    /// terminal.
    pub(super) fn open() -> Option<Keyboard> {
        let terminal: File = io::stdin().as_fd().try_clone_to_owned().ok()?.into();
        // A background process would be stopped.
        if !io::stdout().is_terminal()
            || termios::tcgetpgrp(&terminal).ok()? != rustix::process::getpgrp()
        {
            return None;
        }
        let others = [signal::SIGTSTP, signal::SIGCONT, signal::SIGWINCH];
        let signals = Signals::new(ENDING.iter().chain(&others)).ok()?;
        let (redraw, wake) = UnixStream::pair().ok()?;
        let modes = Arc::new(Modes { terminal, before: Mutex::new(None) });
        modes.take().ok()?;
        // The modes of before are back if there is no thread.
        let keyboard = Keyboard { modes, redraw };
        let modes = keyboard.modes.clone();
        let body = move || obey(signals, &modes, &wake);
        std::thread::Builder::new().name("signals".into()).spawn(body).ok()?;
        Some(keyboard)
    }

    /// Waits for something until `end`.
    ///
    /// # Errors
    /// The terminal is gone.
    pub(super) fn next(&self, end: Instant) -> io::Result<Input> {
        loop {
            let left = timespec(end.saturating_duration_since(Instant::now()));
            let mut waited = [
                PollFd::new(&self.redraw, PollFlags::IN),
                PollFd::new(&self.modes.terminal, PollFlags::IN),
            ];
            match poll(&mut waited, Some(&left)) {
                Ok(0) => return Ok(Input::Nothing),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let [redraw, key] = waited.map(|one| !one.revents().is_empty());
            if redraw {
                // As many as there are: one page is enough.
                let _ = (&self.redraw).read(&mut [0; 64])?;
                return Ok(Input::Redraw);
            }
            let mut byte = [0];
            match key.then(|| rustix::io::read(&self.modes.terminal, &mut byte)) {
                None | Some(Err(Errno::INTR | Errno::AGAIN)) => {}
                Some(Ok(0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(Ok(_)) => return Ok(Input::Key(byte[0])),
                Some(Err(error)) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Keyboard {
    fn drop(&mut self) {
        self.modes.give_back();
    }
}

/// Obeys signals, after restoring the terminal's modes.
fn obey(mut signals: Signals, modes: &Modes, mut wake: &UnixStream) {
    for signal in signals.forever() {
        match signal {
            signal::SIGCONT | signal::SIGWINCH => {
                // SIGCONT may come without a stop, and a shell may have changed the modes.
                if signal == signal::SIGCONT {
                    let _ = modes.take();
                }
                let _ = wake.write_all(&[0]);
            }
            _ => {
                modes.give_back();
                let _ = emulate_default_handler(signal);
            }
        }
    }
}

/// The modes of a terminal.
struct Modes {
    terminal: File,
    /// The former modes, while this process reads the keys.
    before: Mutex<Option<Termios>>,
}

impl Modes {
    /// Has the terminal give each key at once.
    fn take(&self) -> io::Result<()> {
        let mut before = lock(&self.before);
        let mut modes = termios::tcgetattr(&self.terminal)?;
        before.get_or_insert_with(|| modes.clone());
        modes.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        Ok(termios::tcsetattr(&self.terminal, OptionalActions::Now, &modes)?)
    }

    fn give_back(&self) {
        if let Some(before) = lock(&self.before).take() {
            // A closed terminal needs no modes.
            let _ = termios::tcsetattr(&self.terminal, OptionalActions::Now, &before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The modes of a terminal of its own, and whether typed characters are echoed.
    fn terminal() -> (Modes, impl Fn() -> bool) {
        let terminal = File::options().read(true).write(true).open("/dev/ptmx").unwrap();
        let other = terminal.try_clone().unwrap();
        let shows = move || {
            let modes = termios::tcgetattr(&other).unwrap().local_modes;
            assert_eq!(modes.contains(LocalModes::ECHO), modes.contains(LocalModes::ICANON));
            modes.contains(LocalModes::ECHO)
        };
        (Modes { terminal, before: Mutex::new(None) }, shows)
    }

    #[test]
    fn modes_are_back_after_a_panic() {
        let (modes, shows) = terminal();
        let (redraw, _wake) = UnixStream::pair().unwrap();
        let keyboard = Keyboard { modes: Arc::new(modes), redraw };
        keyboard.modes.take().unwrap();
        assert!(!shows());
        let panics = std::panic::AssertUnwindSafe(move || {
            let _keyboard = keyboard;
            std::panic::resume_unwind(Box::new(()));
        });
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(shows());
    }

    #[test]
    fn modes_of_before_are_those_before_the_first_of_several_calls() {
        let (modes, shows) = terminal();
        modes.take().unwrap();
        // Again, as after SIGSTOP and SIGCONT: a program does not notice SIGSTOP.
        modes.take().unwrap();
        assert!(!shows());
        modes.give_back();
        assert!(shows());
        modes.give_back();
        assert!(shows());
        modes.take().unwrap();
        assert!(!shows());
    }
}
