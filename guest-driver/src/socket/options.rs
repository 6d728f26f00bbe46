// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of a connection that concern TCP, with or without SMC.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use rustix::net::sockopt;

use super::SmcStream;

/// When and how often the kernel probes a peer that sends nothing (SO_KEEPALIVE, TCP_KEEPIDLE,
/// TCP_KEEPINTVL, TCP_KEEPCNT).
///
/// TCP has seconds; fractions are rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    /// Silence before the first question.
    pub idle: Duration,
    /// Time between two questions.
    pub interval: Duration,
    /// Questions without answer after which the connection is reset.
    pub count: u32,
}

impl Default for KeepAlive {
    /// The kernel's defaults.
    fn default() -> KeepAlive {
        let (idle, interval) = (Duration::from_secs(7200), Duration::from_secs(75));
        KeepAlive { idle, interval, count: 9 }
    }
}

/// Least keepalive time on the TCP connection of an SMC connection. Only these probes travel there
/// (SOCK-15).
const SHORTEST_KEEPALIVE: Duration = Duration::from_secs(1);

impl KeepAlive {
    fn apply(&self, tcp: &TcpStream, shortest: Duration) -> io::Result<()> {
        let [idle, interval] = [self.idle, self.interval].map(|time| seconds(time.max(shortest)));
        sockopt::set_tcp_keepidle(tcp, idle)?;
        sockopt::set_tcp_keepintvl(tcp, interval)?;
        sockopt::set_tcp_keepcnt(tcp, self.count.clamp(1, 127))?;
        Ok(sockopt::set_socket_keepalive(tcp, true)?)
    }
}

/// Whole seconds, at least one, at most what TCP takes.
fn seconds(time: Duration) -> Duration {
    Duration::from_secs(time.as_nanos().div_ceil(1_000_000_000).clamp(1, 32767) as u64)
}

impl SmcStream {
    /// Remembered; SMC sends everything at once anyway (SOCK-5, CDC-25). The TCP connection underneath
    /// carries nothing that could wait, so its option is not set, which saves a system call.
    ///
    /// # Errors
    /// Those of the socket option, on a connection that is TCP.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        match self.conn() {
            Some(conn) => conn.set_nodelay(nodelay),
            None => self.with_tcp(|tcp| tcp.set_nodelay(nodelay))?,
        }
        Ok(())
    }

    /// Whether [`SmcStream::nodelay`] is what was set once, and not what the TCP connection has: the
    /// program has set it on an SMC connection, or that has left its device.
    pub fn remembers_nodelay(&self) -> bool {
        self.conn().is_some_and(|conn| conn.remembers_nodelay())
    }

    /// What [`SmcStream::set_nodelay`] set.
    ///
    /// # Errors
    /// Those of the socket option, on a connection that is TCP.
    pub fn nodelay(&self) -> io::Result<bool> {
        match self.conn() {
            Some(conn) => conn.nodelay(),
            None => self.with_tcp(TcpStream::nodelay),
        }
    }

    /// Time to live of the TCP connection's packets.
    ///
    /// # Errors
    /// Those of the socket option.
    pub fn set_ttl(&self, ttl: u32) -> io::Result<()> {
        self.with_tcp(|tcp| tcp.set_ttl(ttl))
    }

    /// What [`SmcStream::set_ttl`] set.
    ///
    /// # Errors
    /// Those of the socket option.
    pub fn ttl(&self) -> io::Result<u32> {
        self.with_tcp(TcpStream::ttl)
    }

    /// Sets whether and when the kernel probes a peer that sends nothing (SOCK-10 to SOCK-15).
    ///
    /// TCP probes on its connection, which is idle while SMC carries the data. So firewalls between the
    /// two ends keep it alive. On it,
    /// a second is the least time. SMC-R
    /// also tests the link (TEST LINK) when the connection and the link have been silent for
    /// [`KeepAlive::idle`]; a link that does not answer is one that has failed.
    ///
    /// # Errors
    /// Those of the socket options.
    pub fn set_keepalive(&self, keepalive: Option<KeepAlive>) -> io::Result<()> {
        let smc = self.conn();
        let shortest = match smc {
            Some(_) => SHORTEST_KEEPALIVE,
            None => Duration::ZERO,
        };
        self.with_tcp(|tcp| match keepalive {
            Some(times) => times.apply(tcp, shortest),
            None => Ok(sockopt::set_socket_keepalive(tcp, false)?),
        })?;
        if let Some(conn) = smc {
            conn.set_keepalive(keepalive.map(|times| times.idle));
        }
        *self.keepalive_slot() = keepalive;
        Ok(())
    }

    /// What [`SmcStream::set_keepalive`] set.
    ///
    /// # Errors
    /// None today; as in `std`.
    pub fn keepalive(&self) -> io::Result<Option<KeepAlive>> {
        Ok(*self.keepalive_slot())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: SOCK-15.
    #[test]
    fn keepalive_times_are_whole_seconds_within_the_limits_of_tcp() {
        for (given, taken) in [(0, 1), (1, 1), (999, 1), (1000, 1), (1001, 2), (40_000_000, 32767)]
        {
            let given = Duration::from_millis(given);
            assert_eq!(seconds(given), Duration::from_secs(taken), "{given:?}");
        }
    }

    // Shows: SOCK-10, SOCK-14, SOCK-15.
    #[test]
    fn tcp_is_told_and_a_floor_is_kept() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (idle, interval) = (Duration::from_secs(20), Duration::from_secs(2));
        KeepAlive { idle, interval, count: 4 }.apply(&tcp, Duration::from_secs(5)).unwrap();
        assert!(sockopt::socket_keepalive(&tcp).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&tcp).unwrap(), idle);
        assert_eq!(sockopt::tcp_keepintvl(&tcp).unwrap(), Duration::from_secs(5));
        assert_eq!(sockopt::tcp_keepcnt(&tcp).unwrap(), 4);
    }
}
