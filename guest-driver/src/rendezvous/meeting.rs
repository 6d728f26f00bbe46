//! What sockets do with what a rendezvous knows.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use super::{Options, Policy, Rendezvous, Unavailable};

/// How long a server waits for the first byte of a client that was told to propose.
///
/// A client sends its Proposal when the connection is made, or as soon as it has opened its device: this
/// is time for that, and for the packet to be lost three times. Only one thing else can keep it away, an
/// option that was taken off the SYN-ACK but not off the SYN; then this is what the connection costs where
/// the server is to speak first. Where the client does, its first bytes tell at once.
pub const PROPOSAL_PATIENCE: Duration = Duration::from_secs(4);

/// How a stack learns that a peer speaks SMC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// By configuration: a client proposes SMC to every server, so all of them have to speak it; a
    /// server looks at a client's first bytes. Needs no rights.
    #[default]
    Off,
    /// By TCP option 254 where that can be had, else as [`Mode::Off`]. A server looks at the first
    /// bytes of clients without the option, too, so that both kinds of client are understood.
    Auto,
    /// By TCP option 254 or not at all: everything else is plain TCP (OPT-9).
    Required,
}

/// Why a client stays on TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plain {
    /// The server did not answer the option.
    NotAnswered,
    /// The policy says so.
    Policy,
    /// The option cannot be had here, see [`Meeting::unavailable`].
    Unavailable,
}

/// What a client does on its new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientMove {
    /// It sends its Proposal at once.
    Propose {
        /// The server has answered the option, so it waits for a message: a Decline, if there is
        /// nothing to propose.
        awaited: bool,
    },
    /// It sends no byte of SMC.
    Stay(Plain),
}

/// What a server does on a connection that it accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerMove {
    /// A Proposal will come: looks at the first bytes, for [`PROPOSAL_PATIENCE`].
    ///
    /// If none has come by then the connection is plain TCP: somebody took the option off the
    /// SYN-ACK, so that the client knows of nothing, and waits for the server to speak first.
    AwaitProposal,
    /// Nobody knows: looks at the first bytes, for a short time.
    Look,
    /// No Proposal will come: hands it to the application at once.
    Stay,
}

/// What came of naming a client's socket; for [`Meeting::connected`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it tells what to do on the connection"]
pub struct Asked(Answer);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// The socket asks.
    Yes,
    /// The mode has no use for the option.
    Needless,
    /// The policy forbids it.
    Forbidden,
    /// It could not be named.
    Failed,
}

/// The rendezvous of a stack: a [`Mode`], and what the machine allowed of it.
pub struct Meeting {
    mode: Mode,
    rendezvous: Result<Arc<Rendezvous>, Option<Unavailable>>,
}

impl Meeting {
    /// Attaches, if the mode wants it. That it cannot be had is no failure of the stack: it is
    /// logged, and [`Meeting::unavailable`] says why.
    pub fn open(mode: Mode, options: Options) -> Meeting {
        if mode == Mode::Off {
            return Meeting { mode, rendezvous: Err(None) };
        }
        let rendezvous = Rendezvous::attach(options).map_err(|why| {
            match mode {
                Mode::Required => tracing::warn!(%why, "no TCP option: every connection is TCP"),
                _ => tracing::info!(%why, "no TCP option: peers are known by configuration"),
            }
            Some(why)
        });
        Meeting { mode, rendezvous }
    }

    /// With the rendezvous that the process's parent passed on ([`Rendezvous::pass_on`]), or without
    /// one if it had none or that is gone.
    pub fn adopt(mode: Mode, passed: Option<&str>, policy: Policy) -> Meeting {
        let passed = passed.filter(|_| mode != Mode::Off);
        let adopted = passed.map(|text| Rendezvous::adopt(text, policy));
        let rendezvous = match adopted {
            Some(Ok(rendezvous)) => Ok(rendezvous),
            Some(Err(error)) => {
                tracing::warn!(%error, "the rendezvous that was passed on is gone");
                Err(None)
            }
            None => Err(None),
        };
        Meeting { mode, rendezvous }
    }

    /// With a rendezvous that is there already.
    pub fn with(mode: Mode, rendezvous: Arc<Rendezvous>) -> Meeting {
        Meeting { mode, rendezvous: Ok(rendezvous) }
    }

    /// How peers are found, if the machine allows it.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The rendezvous, if there is one.
    pub fn rendezvous(&self) -> Option<&Arc<Rendezvous>> {
        self.rendezvous.as_ref().ok()
    }

    /// Why there is none although the mode wants one.
    pub fn unavailable(&self) -> Option<&Unavailable> {
        self.rendezvous.as_ref().err()?.as_ref()
    }

    /// To be called before a socket connects.
    pub fn before_connect(&self, socket: impl AsFd, peer: &SocketAddr) -> Asked {
        let Ok(rendezvous) = &self.rendezvous else { return Asked(Answer::Needless) };
        Asked(match rendezvous.want(socket, peer) {
            Ok(true) => Answer::Yes,
            Ok(false) => Answer::Forbidden,
            Err(error) => {
                tracing::debug!(%error, "a client's socket cannot be named");
                Answer::Failed
            }
        })
    }

    /// What a client does now that its socket is connected.
    pub fn connected(&self, socket: impl AsFd, asked: Asked) -> ClientMove {
        let known = match (asked.0, &self.rendezvous) {
            (Answer::Yes, Ok(rendezvous)) => rendezvous.peer_speaks_smc(socket),
            _ => None,
        };
        client_move(self.mode, self.rendezvous.is_ok(), asked.0, known)
    }

    /// Listens as [`TcpListener::bind`] does.
    ///
    /// # Errors
    /// Those of the system calls. That the listener cannot answer is none of them: it is logged.
    pub fn bind(&self, addr: &SocketAddr) -> io::Result<TcpListener> {
        super::bind(addr, |socket| self.listen(socket))
    }

    /// To be called when a listener is bound, before it listens if that can be had.
    pub fn listen(&self, listener: impl AsFd) {
        if let Ok(rendezvous) = &self.rendezvous
            && let Err(error) = rendezvous.listen(listener)
        {
            tracing::warn!(%error, "a listener does not answer clients that ask for SMC");
        }
    }

    /// What a server does on a connection that it has just accepted.
    pub fn accepted(&self, stream: impl AsFd) -> ServerMove {
        let known = self.rendezvous().and_then(|rendezvous| rendezvous.peer_speaks_smc(stream));
        server_move(self.mode, self.rendezvous.is_ok(), known)
    }
}

impl fmt::Debug for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Meeting");
        debug.field("mode", &self.mode).field("attached", &self.rendezvous.is_ok()).finish()
    }
}

fn client_move(mode: Mode, attached: bool, asked: Answer, known: Option<bool>) -> ClientMove {
    match (mode, asked) {
        (Mode::Off, _) => ClientMove::Propose { awaited: false },
        (Mode::Auto, _) if !attached => ClientMove::Propose { awaited: false },
        (Mode::Required, _) if !attached => ClientMove::Stay(Plain::Unavailable),
        (_, Answer::Yes) if known == Some(true) => ClientMove::Propose { awaited: true },
        (_, Answer::Yes) => ClientMove::Stay(Plain::NotAnswered),
        (_, Answer::Forbidden) => ClientMove::Stay(Plain::Policy),
        (_, Answer::Needless | Answer::Failed) => ClientMove::Stay(Plain::Unavailable),
    }
}

fn server_move(mode: Mode, attached: bool, known: Option<bool>) -> ServerMove {
    match (mode, known) {
        (Mode::Off, _) => ServerMove::Look,
        (Mode::Auto, _) if !attached => ServerMove::Look,
        (Mode::Required, _) if !attached => ServerMove::Stay,
        (_, Some(true)) => ServerMove::AwaitProposal,
        // A client that was told by configuration sends no option.
        (Mode::Auto, Some(false) | None) => ServerMove::Look,
        (Mode::Required, Some(false)) => ServerMove::Stay,
        // It may have asked and been answered.
        (Mode::Required, None) => ServerMove::Look,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWERS: [Answer; 4] = [Answer::Yes, Answer::Needless, Answer::Forbidden, Answer::Failed];
    const KNOWN: [Option<bool>; 3] = [None, Some(false), Some(true)];

    #[test]
    fn without_the_option_sockets_do_what_they_are_configured_to() {
        let blind = ClientMove::Propose { awaited: false };
        for known in KNOWN {
            for asked in ANSWERS {
                assert_eq!(client_move(Mode::Off, false, asked, known), blind);
                assert_eq!(client_move(Mode::Auto, false, asked, known), blind);
            }
            assert_eq!(server_move(Mode::Off, false, known), ServerMove::Look);
            assert_eq!(server_move(Mode::Auto, false, known), ServerMove::Look);
        }
    }

    #[test]
    fn where_the_option_is_required_and_cannot_be_had_everything_is_tcp() {
        for known in KNOWN {
            for asked in ANSWERS {
                let next = client_move(Mode::Required, false, asked, known);
                assert_eq!(next, ClientMove::Stay(Plain::Unavailable));
            }
            assert_eq!(server_move(Mode::Required, false, known), ServerMove::Stay);
        }
    }

    #[test]
    fn a_client_proposes_only_to_a_server_that_answered() {
        for mode in [Mode::Auto, Mode::Required] {
            for asked in ANSWERS {
                for known in KNOWN {
                    let proposes = client_move(mode, true, asked, known)
                        == ClientMove::Propose { awaited: true };
                    assert_eq!(proposes, asked == Answer::Yes && known == Some(true));
                }
            }
            let why = |asked| client_move(mode, true, asked, None);
            assert_eq!(why(Answer::Yes), ClientMove::Stay(Plain::NotAnswered));
            assert_eq!(why(Answer::Forbidden), ClientMove::Stay(Plain::Policy));
            assert_eq!(why(Answer::Failed), ClientMove::Stay(Plain::Unavailable));
        }
    }

    #[test]
    fn a_server_waits_looks_or_stays() {
        use ServerMove::{AwaitProposal, Look, Stay};
        for (mode, moves) in [
            (Mode::Auto, [Look, Look, AwaitProposal]),
            (Mode::Required, [Look, Stay, AwaitProposal]),
        ] {
            assert_eq!(KNOWN.map(|known| server_move(mode, true, known)), moves, "{mode:?}");
        }
    }

    #[test]
    fn a_meeting_that_is_off_asks_for_nothing() {
        let meeting = Meeting::open(Mode::Off, Options::default());
        assert!(meeting.rendezvous().is_none() && meeting.unavailable().is_none());
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        meeting.listen(&listener);
        let to = listener.local_addr().unwrap();
        let client = std::net::TcpStream::connect(to).unwrap();
        let asked = meeting.before_connect(&client, &to);
        assert_eq!(meeting.connected(&client, asked), ClientMove::Propose { awaited: false });
        let (server, _) = listener.accept().unwrap();
        assert_eq!(meeting.accepted(&server), ServerMove::Look);
    }
}
