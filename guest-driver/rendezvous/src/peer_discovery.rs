// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From the answer of the TCP option to a socket's next step: propose SMC, wait for a Proposal, or use TCP.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use super::{Options, Policy, Rendezvous, Unavailable};

/// Longest wait of a server with plain clients, too, for the first byte of a client with an announced
/// Proposal. As long as the kernel's AF_SMC.
///
/// A client sends its Proposal once the connection is established, or as soon as its device is open. The time
/// is enough for both, and for four losses of the packet.
pub const PROPOSAL_TIMEOUT: Duration = Duration::from_secs(6);

/// The way of a stack to learn of SMC peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// By configuration: a client proposes SMC to every server, so all servers have to speak SMC. A server
    /// peeks at a client's first bytes. This mode needs no capabilities.
    #[default]
    Off,
    /// By TCP option 254 where the machine allows the option, else as [`Mode::Off`]. A server also peeks at
    /// the first bytes of clients without the option, to understand both kinds of client.
    Auto,
    /// By TCP option 254 only: a connection without the option is plain TCP (OPT-9). With the option, a
    /// server ends the connection if the client sends no CLC message.
    Required,
}

/// Why a client uses TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpReason {
    /// The server did not answer the option.
    NotAnswered,
    /// The policy forbids SMC for this connection.
    Policy,
    /// This process cannot use the option; see [`PeerDiscovery::unavailable`].
    Unavailable,
}

/// The next step of a client on its new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAction {
    /// The client sends its Proposal at once.
    Propose {
        /// The server has answered the option, and waits for a message. A client without a proposal sends a
        /// Decline.
        awaited: bool,
    },
    /// The client sends no byte of SMC (OPT-9), and takes no byte as SMC (OPT-13).
    UseTcp(TcpReason),
}

/// The next step of a server on an accepted connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerAction {
    /// Both ends have announced SMC, so a Proposal will come. With [`Mode::Required`] other bytes, or none
    /// within the time for a CLC message, break the connection (OPT-8, ERR-8, ERR-9).
    ///
    /// A middlebox removing the option from the SYN-ACK leaves a client unaware of its Proposal. With
    /// [`Mode::Auto`], and in programs under `smc run`, the server peeks at the first bytes instead, for
    /// [`PROPOSAL_TIMEOUT`], and takes a client without a CLC message for a plain client (OPT-16).
    /// CLC message for a plain one (OPT-16).
    AwaitProposal,
    /// A Proposal may come: the server peeks at the first bytes, for a short time.
    Peek,
    /// The client has not announced a Proposal. A client configured for SMC may propose all the same: a
    /// server without another need to wait for the first bytes takes the client for a plain client.
    NotAnnounced,
    /// No Proposal will come: the server hands the connection to the application at once.
    UseTcp,
}

/// Whether a client's socket sends the option: the result of [`PeerDiscovery::before_connect`], for
/// [`PeerDiscovery::connected`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "`PeerDiscovery::connected` needs it"]
pub struct OptionRequest(Request);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    /// The socket sends the option.
    Sent,
    /// The process has no rendezvous.
    NotAttached,
    /// The policy forbids the option.
    Forbidden,
    /// The kernel refused to mark the socket.
    Failed,
}

/// Discovery of SMC peers for a stack: a [`Mode`], and the rendezvous if the machine allows one.
pub struct PeerDiscovery {
    mode: Mode,
    rendezvous: Result<Arc<Rendezvous>, Option<Unavailable>>,
}

impl PeerDiscovery {
    /// Opens a rendezvous if the mode uses one. The stack also works without: a failure is logged, and
    /// [`PeerDiscovery::unavailable`] returns the reason.
    pub fn open(mode: Mode, options: Options) -> PeerDiscovery {
        if mode == Mode::Off {
            return PeerDiscovery { mode, rendezvous: Err(None) };
        }
        let rendezvous = Rendezvous::open(options).map_err(|why| {
            match mode {
                Mode::Required => tracing::warn!(%why, "no TCP option: every connection is TCP"),
                _ => tracing::info!(%why, "no TCP option: peers are known by configuration"),
            }
            Some(why)
        });
        PeerDiscovery { mode, rendezvous }
    }

    /// Uses the rendezvous passed on by the process's parent ([`Rendezvous::pass_on`]). Works without a
    /// rendezvous if the parent had none or its descriptors have been closed.
    pub fn adopt(mode: Mode, passed: Option<&str>, policy: Policy) -> PeerDiscovery {
        let passed = passed.filter(|_| mode != Mode::Off);
        let adopted = passed.map(|text| Rendezvous::adopt(text, policy));
        let rendezvous = match adopted {
            Some(Ok(rendezvous)) => Ok(rendezvous),
            Some(Err(error)) => {
                tracing::warn!(%error, "the rendezvous that was passed on is gone");
                Err(Some(Unavailable::PassedOn(error)))
            }
            None => Err(None),
        };
        PeerDiscovery { mode, rendezvous }
    }

    /// Uses a rendezvous attached by the caller.
    pub fn with(mode: Mode, rendezvous: Arc<Rendezvous>) -> PeerDiscovery {
        PeerDiscovery { mode, rendezvous: Ok(rendezvous) }
    }

    /// The requested mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The rendezvous, if there is one.
    pub fn rendezvous(&self) -> Option<&Arc<Rendezvous>> {
        self.rendezvous.as_ref().ok()
    }

    /// Why there is no rendezvous although the mode uses one.
    pub fn unavailable(&self) -> Option<&Unavailable> {
        self.rendezvous.as_ref().err()?.as_ref()
    }

    /// Has a client's socket send the option if mode and policy allow. Call this before the socket
    /// connects to `peer`.
    pub fn before_connect(&self, socket: impl AsFd, peer: &SocketAddr) -> OptionRequest {
        let Ok(rendezvous) = &self.rendezvous else { return OptionRequest(Request::NotAttached) };
        OptionRequest(match rendezvous.want(socket, peer) {
            Ok(true) => Request::Sent,
            Ok(false) => Request::Forbidden,
            Err(error) => {
                tracing::debug!(%error, "a client's socket cannot ask for SMC");
                Request::Failed
            }
        })
    }

    /// Undoes [`PeerDiscovery::before_connect`] for an unconnected socket.
    pub fn unmark(&self, socket: impl AsFd) {
        if let Ok(rendezvous) = &self.rendezvous
            && let Err(error) = rendezvous.unmark(socket)
        {
            tracing::debug!(%error, "a client's socket goes on asking for SMC");
        }
    }

    /// The next step of a client with a connected socket.
    pub fn connected(&self, socket: impl AsFd, asked: OptionRequest) -> ClientAction {
        let known = match (asked.0, &self.rendezvous) {
            (Request::Sent, Ok(rendezvous)) => rendezvous.peer_speaks_smc(socket),
            _ => None,
        };
        client_action(self.mode, self.rendezvous.is_ok(), asked.0, known)
    }

    /// Like [`PeerDiscovery::connected`], while TCP may still be connecting. `None`: the server has not
    /// answered yet, or this end has not asked.
    pub fn answered(&self, socket: impl AsFd, asked: OptionRequest) -> Option<ClientAction> {
        let rendezvous = self.rendezvous().filter(|_| asked.0 == Request::Sent)?;
        let known = rendezvous.peer_speaks_smc(socket)?;
        Some(client_action(self.mode, true, asked.0, Some(known)))
    }

    /// Listens like [`TcpListener::bind`].
    ///
    /// # Errors
    /// The errors of the system calls. A listener unable to answer the option is logged and no error.
    pub fn bind(&self, addr: &SocketAddr) -> io::Result<TcpListener> {
        super::bind(addr, |socket| {
            self.listen(socket);
        })
    }

    /// Has a listener answer the option. Call this for a bound listener, if possible before listen(2).
    /// `false`: the listener does not answer.
    pub fn listen(&self, listener: impl AsFd) -> bool {
        let Ok(rendezvous) = &self.rendezvous else { return false };
        self.listen_by(&rendezvous.policy, None, listener)
    }

    /// Like [`PeerDiscovery::listen`], by a policy of the caller's; see [`Rendezvous::listen_by`].
    pub fn listen_by(&self, policy: &Policy, before: Option<&Policy>, listener: impl AsFd) -> bool {
        let Ok(rendezvous) = &self.rendezvous else { return false };
        rendezvous.listen_by(policy, before, listener.as_fd()).unwrap_or_else(|error| {
            tracing::warn!(%error, "a listener does not answer clients that ask for SMC");
            false
        })
    }

    /// The next step of a server on a just accepted connection of an answering listener
    /// ([`PeerDiscovery::listen`] returned `true`), if the absence of the client's option is certain without
    /// a system call.
    ///
    /// `None`: ask [`PeerDiscovery::accepted`]. Also with [`Mode::Required`]: a reset connection is no longer
    /// counted among the connections with the option, and its first bytes would not be checked.
    pub fn accepted_from(&self, client: &SocketAddr) -> Option<ServerAction> {
        let rendezvous = self.rendezvous().filter(|_| self.mode == Mode::Auto)?;
        (!rendezvous.may_speak_smc(client)).then(|| server_action(self.mode, true, Some(false)))
    }

    /// The next step of a server on a just accepted connection.
    pub fn accepted(&self, stream: impl AsFd) -> ServerAction {
        let known = self.rendezvous().and_then(|rendezvous| rendezvous.peer_speaks_smc(stream));
        server_action(self.mode, self.rendezvous.is_ok(), known)
    }
}

impl fmt::Debug for PeerDiscovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("PeerDiscovery");
        debug.field("mode", &self.mode).field("attached", &self.rendezvous.is_ok()).finish()
    }
}

fn client_action(mode: Mode, attached: bool, asked: Request, known: Option<bool>) -> ClientAction {
    match (mode, asked) {
        (Mode::Off, _) => ClientAction::Propose { awaited: false },
        (Mode::Auto, _) if !attached => ClientAction::Propose { awaited: false },
        (Mode::Required, _) if !attached => ClientAction::UseTcp(TcpReason::Unavailable),
        (_, Request::Sent) if known == Some(true) => ClientAction::Propose { awaited: true },
        (_, Request::Sent) => ClientAction::UseTcp(TcpReason::NotAnswered),
        (_, Request::Forbidden) => ClientAction::UseTcp(TcpReason::Policy),
        (_, Request::NotAttached | Request::Failed) => ClientAction::UseTcp(TcpReason::Unavailable),
    }
}

fn server_action(mode: Mode, attached: bool, known: Option<bool>) -> ServerAction {
    match (mode, known) {
        (Mode::Off, _) => ServerAction::Peek,
        (Mode::Auto, _) if !attached => ServerAction::Peek,
        (Mode::Required, _) if !attached => ServerAction::UseTcp,
        (_, Some(true)) => ServerAction::AwaitProposal,
        (Mode::Auto, Some(false)) => ServerAction::NotAnnounced,
        (Mode::Auto, None) => ServerAction::Peek,
        (Mode::Required, Some(false)) => ServerAction::UseTcp,
        // The client may have sent the option, and the kernel may have answered it.
        (Mode::Required, None) => ServerAction::Peek,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUESTS: [Request; 4] =
        [Request::Sent, Request::NotAttached, Request::Forbidden, Request::Failed];
    const KNOWN: [Option<bool>; 3] = [None, Some(false), Some(true)];

    #[test]
    fn without_the_option_sockets_do_what_they_are_configured_to() {
        let blind = ClientAction::Propose { awaited: false };
        for known in KNOWN {
            for asked in REQUESTS {
                assert_eq!(client_action(Mode::Off, false, asked, known), blind);
                assert_eq!(client_action(Mode::Auto, false, asked, known), blind);
            }
            assert_eq!(server_action(Mode::Off, false, known), ServerAction::Peek);
            assert_eq!(server_action(Mode::Auto, false, known), ServerAction::Peek);
        }
    }

    #[test]
    fn where_the_option_is_required_and_cannot_be_had_everything_is_tcp() {
        for known in KNOWN {
            for asked in REQUESTS {
                let next = client_action(Mode::Required, false, asked, known);
                assert_eq!(next, ClientAction::UseTcp(TcpReason::Unavailable));
            }
            assert_eq!(server_action(Mode::Required, false, known), ServerAction::UseTcp);
        }
    }

    #[test]
    fn a_client_proposes_only_to_a_server_that_answered() {
        for mode in [Mode::Auto, Mode::Required] {
            for asked in REQUESTS {
                for known in KNOWN {
                    let proposes = client_action(mode, true, asked, known)
                        == ClientAction::Propose { awaited: true };
                    assert_eq!(proposes, asked == Request::Sent && known == Some(true));
                }
            }
            let why = |asked| client_action(mode, true, asked, None);
            assert_eq!(why(Request::Sent), ClientAction::UseTcp(TcpReason::NotAnswered));
            assert_eq!(why(Request::Forbidden), ClientAction::UseTcp(TcpReason::Policy));
            assert_eq!(why(Request::Failed), ClientAction::UseTcp(TcpReason::Unavailable));
        }
    }

    #[test]
    fn a_server_waits_peeks_or_uses_tcp() {
        use ServerAction::{AwaitProposal, NotAnnounced, Peek, UseTcp};
        for (mode, moves) in [
            (Mode::Auto, [Peek, NotAnnounced, AwaitProposal]),
            (Mode::Required, [Peek, UseTcp, AwaitProposal]),
        ] {
            assert_eq!(KNOWN.map(|known| server_action(mode, true, known)), moves, "{mode:?}");
        }
    }

    #[test]
    fn peer_discovery_that_is_off_asks_for_nothing() {
        let discovery = PeerDiscovery::open(Mode::Off, Options::default());
        assert!(discovery.rendezvous().is_none() && discovery.unavailable().is_none());
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        discovery.listen(&listener);
        let to = listener.local_addr().unwrap();
        let client = std::net::TcpStream::connect(to).unwrap();
        let asked = discovery.before_connect(&client, &to);
        assert_eq!(discovery.connected(&client, asked), ClientAction::Propose { awaited: false });
        let (server, _) = listener.accept().unwrap();
        assert_eq!(discovery.accepted(&server), ServerAction::Peek);
    }
}
