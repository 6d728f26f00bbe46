// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of a connection for TCP, with or without SMC.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::net::sockopt;

use super::SmcStream;

/// The time and number of the kernel's probes of a silent peer (SO_KEEPALIVE, TCP_KEEPIDLE,
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
    fn apply(&self, tcp: BorrowedFd<'_>, shortest: Duration) -> io::Result<()> {
        let [idle, interval] = [self.idle, self.interval].map(|time| seconds(time.max(shortest)));
        sockopt::set_tcp_keepidle(tcp, idle)?;
        sockopt::set_tcp_keepintvl(tcp, interval)?;
        sockopt::set_tcp_keepcnt(tcp, self.count.clamp(1, 127))?;
        Ok(sockopt::set_socket_keepalive(tcp, true)?)
    }
}

/// Whole seconds, at least one, at most TCP's limit.
fn seconds(time: Duration) -> Duration {
    Duration::from_secs(time.as_nanos().div_ceil(1_000_000_000).clamp(1, 32767) as u64)
}

impl SmcStream {
    /// Remembered; SMC sends everything at once anyway (SOCK-5, CDC-25). The TCP connection underneath
    /// carries nothing to be delayed, so its option is not set, which saves a system call.
    ///
    /// # Errors
    /// An error of the socket option, on a connection that is TCP.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        match self.conn() {
            Some(conn) => conn.set_nodelay(nodelay),
            None => self.with_tcp(|tcp| Ok(sockopt::set_tcp_nodelay(tcp, nodelay)?))?,
        }
        Ok(())
    }

    /// Whether [`SmcStream::nodelay`] returns a remembered value instead of the TCP connection's: the
    /// program has set it on an SMC connection, or the connection has left its device.
    pub fn remembers_nodelay(&self) -> bool {
        self.conn().is_some_and(|conn| conn.remembers_nodelay())
    }

    /// The value of [`SmcStream::set_nodelay`].
    ///
    /// # Errors
    /// An error of the socket option, on a connection that is TCP.
    pub fn nodelay(&self) -> io::Result<bool> {
        match self.conn() {
            Some(conn) => conn.nodelay(),
            None => self.with_tcp(|tcp| Ok(sockopt::tcp_nodelay(tcp)?)),
        }
    }

    /// Time to live of the TCP connection's packets.
    ///
    /// # Errors
    /// An error of the socket option.
    pub fn set_ttl(&self, ttl: u32) -> io::Result<()> {
        self.with_tcp(|tcp| Ok(sockopt::set_ip_ttl(tcp, ttl)?))
    }

    /// The value of [`SmcStream::set_ttl`].
    ///
    /// # Errors
    /// An error of the socket option.
    pub fn ttl(&self) -> io::Result<u32> {
        self.with_tcp(|tcp| Ok(sockopt::ip_ttl(tcp)?))
    }

    /// Sets whether and when the kernel probes a silent peer (SOCK-10 to SOCK-15).
    ///
    /// TCP probes on its connection, idle while SMC carries the data. So firewalls between the two ends
    /// keep the connection alive. There, a second is the least time. SMC-R also tests the link (TEST
    /// LINK) when the connection and the link have been silent for [`KeepAlive::idle`]; a link without
    /// an answer has failed.
    ///
    /// # Errors
    /// An error of the socket options.
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

    /// The value of [`SmcStream::set_keepalive`].
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
    use std::os::fd::AsFd;

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
        let tcp = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (idle, interval) = (Duration::from_secs(20), Duration::from_secs(2));
        let wanted = KeepAlive { idle, interval, count: 4 };
        wanted.apply(tcp.as_fd(), Duration::from_secs(5)).unwrap();
        assert!(sockopt::socket_keepalive(&tcp).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&tcp).unwrap(), idle);
        assert_eq!(sockopt::tcp_keepintvl(&tcp).unwrap(), Duration::from_secs(5));
        assert_eq!(sockopt::tcp_keepcnt(&tcp).unwrap(), 4);
    }
}
